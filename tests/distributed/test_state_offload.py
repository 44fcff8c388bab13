"""Optimizer state in host memory in real runs: the same steps, checkpoints and resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_steps
from shardyard.torch_private import placed_as
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # parallel, optim, precision
    "zero 3": ({"dp_shard": 2}, {}, {}),
    "zero 1, lamb": ({"dp_shard": 2, "zero": 1}, {"name": "lamb"}, {}),
    "tp, bf16 averages": ({"tp": 2}, {}, {"optimizer_states": "bf16"}),
    "pp, sgd": ({"pp": 2}, {"name": "sgd", "momentum": 0.9, "micro_batch": 3}, {}),
}


def _run(
    folder: Path, corpus: Corpus, name: str, *, offload: str, steps: int, attempt: int = 0
) -> RunDir:
    parallel, optim, precision = LAYOUTS[name]
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": steps},
        "parallel": parallel,
        "optim": {"lr": 1e-2, "warmup_steps": 2, "decay_steps": 8, **optim},
        "precision": precision,
        "memory": {"offload": offload},
        "cluster": {"devices": 2},
    }
    return make_run(folder, corpus, sections, attempt=attempt)


def _placed_of_another() -> tuple[bool, bool, str]:
    """A bf16 average with the place of an fp32 parameter: its own memory, and its own format."""
    mesh = init_device_mesh("cpu", (2,))
    param = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    average = torch.ones(2, 3, dtype=torch.bfloat16)
    placed = placed_as(param, average)
    assert isinstance(placed, DTensor)
    is_same = placed.to_local().data_ptr() == average.data_ptr()
    return is_same, placed.placements == param.placements, f"{placed.dtype} {tuple(placed.shape)}"


def test_state_in_host_memory_has_the_place_of_its_parameter() -> None:
    found = run_on_ranks(_placed_of_another, 2)
    assert found == [(True, True, "torch.bfloat16 (4, 3)")] * 2


def _train_all(run_dirs: list[tuple[RunDir, int]]) -> None:
    for run_dir, attempt in run_dirs:
        assert train_here(run_dir, attempt) == "finished"


def _steps(run_dir: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]


@pytest.mark.parametrize(
    "names",
    [["zero 3"], pytest.param([*LAYOUTS][1:], marks=pytest.mark.system)],
    ids=["one", "more"],
)
def test_steps_are_those_without_and_a_resume_may_change_it(
    corpus: Corpus, tmp_path: Path, names: list[str]
) -> None:
    todo, pairs = [], []
    for name in names:
        plain = _run(tmp_path / name / "plain", corpus, name, offload="none", steps=6)
        for attempt, (offload, steps) in enumerate(
            (("optimizer", 4), ("optimizer", 5), ("none", 6))
        ):
            moved = _run(
                tmp_path / name / "moved",
                corpus,
                name,
                offload=offload,
                steps=steps,
                attempt=attempt,
            )
        todo += [(plain, 0), (moved, 0), (moved, 1), (moved, 2)]
        pairs.append((name, plain, moved))
    run_on_ranks(_train_all, 2, todo)
    for name, plain, moved in pairs:
        assert len(_steps(plain)) == 6
        assert _steps(moved) == _steps(plain), name
