"""Optimizer state, or also weights, in host memory in real runs: the same steps, checkpoints and
resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.torch_private import dtensor_like
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

Layout = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Settings of parallel, optim and precision."""

STATES: dict[str, Layout] = {
    "zero 3": ({"dp_shard": 2}, {}, {}),
    "zero 1, lamb": ({"dp_shard": 2, "zero": 1}, {"name": "lamb"}, {}),
    "tp, bf16 averages": ({"tp": 2}, {}, {"optimizer_states": "bf16"}),
    "pp, sgd": ({"pp": 2}, {"name": "sgd", "momentum": 0.9, "micro_batch": 3}, {}),
    "tp, adafactor": ({"tp": 2}, {"name": "adafactor"}, {}),
    "zero 3, schedule-free": ({"dp_shard": 2}, {"name": "schedule_free_adamw"}, {}),
}
WEIGHTS: dict[str, Layout] = {
    # uneven shards, several micro-batches
    "zero 3": ({"dp_shard": 2, "zero": 3}, {"micro_batch": 1}, {}),
    "replicas, bf16": (
        {"dp_replicate": 2, "dp_shard": 1, "zero": 3},
        {},
        {"compute": "bf16", "optimizer_states": "bf16"},
    ),
    "tp, sgd": ({"tp": 2, "zero": 3}, {"name": "sgd", "momentum": 0.9}, {}),
    "pp": ({"pp": 2, "zero": 3}, {"micro_batch": 3}, {}),
    "zero 3, schedule-free": ({"dp_shard": 2, "zero": 3}, {"name": "schedule_free_adamw"}, {}),
}


def _run(
    folder: Path, corpus: Corpus, layout: Layout, *, offload: str, steps: int, attempt: int = 0
) -> RunDir:
    parallel, optim, precision = layout
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
    placed = dtensor_like(param, average, param.placements, param.shape)
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


def _check_equal(corpus: Corpus, folder: Path, what: str, layouts: dict[str, Layout]) -> None:
    """Offloaded for four steps, resumed for one, and resumed without for one more."""
    todo, pairs = [], []
    for name, layout in layouts.items():
        plain = _run(folder / name / "plain", corpus, layout, offload="none", steps=6)
        for attempt, (offload, steps) in enumerate(((what, 4), (what, 5), ("none", 6))):
            moved = _run(
                folder / name / "moved",
                corpus,
                layout,
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


@pytest.mark.parametrize(
    "names",
    [["zero 3"], pytest.param([*STATES][1:], marks=pytest.mark.slow)],
    ids=["one", "more"],
)
def test_steps_are_those_without_and_a_resume_may_change_it(
    corpus: Corpus, tmp_path: Path, names: list[str]
) -> None:
    _check_equal(corpus, tmp_path, "optimizer", {name: STATES[name] for name in names})


@pytest.mark.parametrize(
    "names",
    [["zero 3"], pytest.param([*WEIGHTS][1:], marks=pytest.mark.slow)],
    ids=["one", "more"],
)
def test_steps_with_weights_in_host_memory_are_those_without(
    corpus: Corpus, tmp_path: Path, names: list[str]
) -> None:
    _check_equal(corpus, tmp_path, "params", {name: WEIGHTS[name] for name in names})
