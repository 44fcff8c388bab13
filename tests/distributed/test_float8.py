"""Training in fp8, rounded as a device would and multiplied exactly, beside bf16."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.loop import FINISHED
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

pytest.importorskip("torchao", reason="pip install 'shardyard[fp8]'")

STEPS = 8
LAYOUTS: list[dict[str, dict[str, Any]]] = [
    {"parallel": {"dp_shard": 2}, "memory": {"recompute": "full"}},
    {"parallel": {"dp_shard": 2}, "memory": {"recompute": "selective", "offload": "activations"}},
    {"parallel": {"tp": 2}, "precision": {"fp8_scaling": "rowwise"}},
    {"parallel": {"pp": 2}, "optim": {"micro_batch": 2}},
]


def _run(
    folder: Path, corpus: Corpus, compute: str, processes: int = 1, **extra: dict[str, Any]
) -> RunDir:
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "optim": {"lr": 1e-3, "micro_batch": 2},
        "precision": {"compute": compute},
        "cluster": {"devices": processes},
    }
    merged = {name: {**base.get(name, {}), **extra.get(name, {})} for name in {*base, *extra}}
    return make_run(folder, corpus, merged)


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == FINISHED


def _values(run_dir: RunDir, key: str) -> list[float]:
    return [line[key] for line in read_steps(run_dir.metrics)]


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[2:3], pytest.param([*LAYOUTS[:2], *LAYOUTS[3:]], marks=pytest.mark.slow)],
    ids=["one", "more"],
)
def test_losses_follow_those_of_bf16_in_every_layout(
    corpus: Corpus, tmp_path: Path, layouts: list[dict[str, dict[str, Any]]]
) -> None:
    bf16, one = (_run(tmp_path / compute, corpus, compute) for compute in ("bf16", "fp8"))
    run_on_ranks(_train_all, 1, [bf16, one])
    many = [
        _run(tmp_path / str(number), corpus, "fp8", 2, **layout)
        for number, layout in enumerate(layouts)
    ]
    run_on_ranks(_train_all, 2, many)
    for run_dir in (one, *many):
        losses, norms = _values(run_dir, "loss"), _values(run_dir, "grad_norm")
        assert losses != _values(bf16, "loss")  # it does what it says
        assert losses == pytest.approx(_values(bf16, "loss"), rel=5e-3), run_dir.path.name
        assert norms == pytest.approx(_values(bf16, "grad_norm"), rel=0.1), run_dir.path.name


@pytest.mark.slow
def test_compiled_blocks_multiply_in_fp8(corpus: Corpus, tmp_path: Path) -> None:
    eager, compiled, exact = (
        _run(tmp_path / f"{compute}-{is_compiled}", corpus, compute, model={"compile": is_compiled})
        for compute, is_compiled in (("fp8", False), ("fp8", True), ("bf16", False))
    )
    run_on_ranks(_train_all, 1, [eager, compiled, exact], timeout_s=1200)
    assert _values(compiled, "loss") == pytest.approx(_values(eager, "loss"), rel=5e-3)
    assert _values(compiled, "loss") != _values(exact, "loss")


@pytest.mark.system
def test_a_run_may_go_on_in_the_other_format(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "run", corpus, "fp8", run={"steps": 4, "seed": 1})
    run_on_ranks(train_here, 1, run_dir)
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS, "seed": 1},
        "optim": {"lr": 1e-3, "micro_batch": 2, "decay_steps": 4},
        "precision": {"compute": "bf16"},
    }
    make_run(run_dir.path, corpus, sections, attempt=1)
    assert run_on_ranks(train_here, 1, run_dir, 1) == [FINISHED]
    assert len(_values(run_dir, "loss")) == STEPS
