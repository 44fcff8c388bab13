"""``precision.reduce=exact``: any number of ranks makes the same bits."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.checkpoint.bitwise_compare import compare_bits, main
from shardyard.errors import TrainingError
from shardyard.parallel.gradients import local_part
from shardyard.parallel.reproducible_sums import HEADROOM
from shardyard.rundir.jsonl import read_evaluations
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from shardyard.train.setup import set_up
from tests.distributed.image_runs import make_image_run, write_network, write_pictures
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

STEPS = 4
SYSTEM, SLOW = pytest.mark.system, pytest.mark.slow

Layouts = dict[str, tuple[int, dict[str, Any]]]
SMALLEST: Layouts = {"3 zero 2": (3, {"strategy": "SHARD_GRAD_OP"})}
OTHERS: Layouts = {
    "2 zero 3": (2, {"strategy": "FULL_SHARD"}),
    "4 hybrid": (4, {"strategy": "HYBRID_SHARD", "dp_shard": 2}),
}
MORE: Layouts = {
    "2 copies": (2, {"strategy": "NO_SHARD"}),
    "2 zero 1": (2, {"strategy": "ZERO_1"}),
    "2 zero 2": (2, {"strategy": "SHARD_GRAD_OP"}),
    "3 copies": (3, {"strategy": "NO_SHARD"}),
    "3 zero 1": (3, {"strategy": "ZERO_1"}),
    "3 zero 3": (3, {"strategy": "FULL_SHARD"}),
    "4 zero 1": (4, {"strategy": "ZERO_1"}),
    "4 zero 2": (4, {"strategy": "SHARD_GRAD_OP"}),
    "4 zero 3": (4, {"strategy": "FULL_SHARD"}),
    "4 hybrid, zero 1": (4, {"zero": 1, "dp_shard": 2, "dp_replicate": 2}),
    "4 hybrid, zero 2": (4, {"zero": 2, "dp_shard": 2, "dp_replicate": 2}),
    "6 zero 2": (6, {"strategy": "SHARD_GRAD_OP"}),
    "6 hybrid": (6, {"strategy": "HYBRID_SHARD", "dp_shard": 3}),
    "8 zero 1": (8, {"strategy": "ZERO_1"}),
    "8 zero 3": (8, {"strategy": "FULL_SHARD"}),
    "8 hybrid": (8, {"strategy": "HYBRID_SHARD", "dp_shard": 4}),
}


def _sections(
    processes: int, parallel: dict[str, Any], reduce: str = "exact", **optim: Any
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {"dropout": 0.1},
        # 3 does not divide 8: a rank has a weightless one
        "optim": {"global_batch": 8, "micro_batch": 1, **optim},
        "precision": {"reduce": reduce},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }


def _image_sections(processes: int, parallel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    # micro-batches of 4, 4 and 2 images
    sections = _sections(processes, parallel, global_batch=10, micro_batch=4)
    return {**sections, "model": {"dropout": 0.2, "drop_path": 0.3}}


def _outcome(left: RunDir, right: RunDir) -> str:
    verdict = compare_bits(left, right)
    assert verdict.outcome != "not proven", verdict.why
    assert read_evaluations(left.metrics) == read_evaluations(right.metrics) or (
        verdict.outcome == "different"
    )
    return verdict.outcome


def _hold(corpus: Corpus, folder: Path, layouts: Layouts, **optim: Any) -> RunDir:
    """Train on one rank, and hold the same on others to it; returns the one."""
    alone = make_run(folder / "alone", corpus, _sections(1, {}, **optim))
    run_on_ranks(train_here, 1, alone)
    for name, (processes, parallel) in layouts.items():
        run_dir = make_run(folder / name, corpus, _sections(processes, parallel, **optim))
        run_on_ranks(train_here, processes, run_dir)
        assert _outcome(alone, run_dir) == "equal", f"{name}: {compare_bits(alone, run_dir).why}"
    return alone


def test_three_ranks_make_the_weights_of_one(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = _hold(corpus, tmp_path, SMALLEST)
    # a test that cannot fail is none: sums in fp32 make others
    processes, parallel = SMALLEST["3 zero 2"]
    rounded = make_run(tmp_path / "fp32", corpus, _sections(processes, parallel, "fp32"))
    run_on_ranks(train_here, processes, rounded)
    found = compare_bits(alone, rounded)
    assert found.outcome == "different" and found.step == 1
    assert found.tensor is not None and found.rank in range(3), found
    assert main([str(alone.path), str(rounded.path)]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(found)
    # and what is not there proves nothing
    alone.metrics.write_text("".join(alone.metrics.read_text().splitlines(keepends=True)[1:]))
    same = compare_bits(alone, alone)
    assert same.outcome == "not proven" and same.why == "run 1 has no line of step 1"
    rmtree(rounded.checkpoint(STEPS))
    same = compare_bits(rounded, rounded)
    assert same.outcome == "not proven" and "checkpoints of step 4" in same.why


def _take_steps_of_all_kinds(run_dir: RunDir) -> dict[str, Any]:
    """Passes of steps whose scales fit or do not, and what a broken one comes to."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    stepper, computation = training.stepper, training.task.computation
    assert stepper.exact is not None
    backward, passes = computation.backward, [0]

    def counted(batches: Any) -> Any:
        passes[0] += 1
        return backward(batches)

    computation.backward = counted  # type: ignore[method-assign]

    def step(**options: Any) -> tuple[int, float]:
        before = passes[0]
        result = stepper.run(next(training.loader), lr=0.0, drain=False, **options).read()
        return passes[0] - before, result.grad_norm

    def lowered(bits: int) -> dict[str, int]:
        assert stepper.exact is not None
        return {name: exponent - bits for name, exponent in stepper.exact.values().items()}

    found: dict[str, Any] = {"first": step(), "second": step()}
    stepper.exact.load(lowered(HEADROOM - 5))
    found["within"] = step()
    stepper.exact.load(lowered(HEADROOM + 5))
    found["beyond"] = step()
    held = stepper.exact.values()
    found["poisoned"] = step(poisoned=True)
    found["scales stay"] = stepper.exact.values().keys() == held.keys()

    def other_weights(batches: Any) -> Any:
        part = counted(batches)
        with torch.no_grad():
            local_part(next(computation.model.parameters()).detach()).mul_(3.0)
        return part

    computation.backward = other_weights  # type: ignore[method-assign]
    stepper.exact.load({})
    with pytest.raises(TrainingError, match=r"computed again.*instead of.*not deterministic"):
        step()
    training.close()
    return found


def test_a_step_beyond_its_scales_is_computed_again(corpus: Corpus, tmp_path: Path) -> None:
    sections = {**_sections(1, {}), "run": {"steps": 6}}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    found = run_on_ranks(_take_steps_of_all_kinds, 1, run_dir)[0]
    passes = {name: each[0] for name, each in found.items() if name != "scales stay"}
    assert passes == {"first": 2, "second": 1, "within": 1, "beyond": 2, "poisoned": 1}
    assert math.isnan(found["poisoned"][1]) and found["scales stay"]
    assert all(math.isfinite(found[name][1]) for name in passes if name != "poisoned")


@pytest.mark.parametrize(
    ("layouts", "optim"),
    [
        pytest.param(OTHERS, {}, marks=SYSTEM),
        pytest.param(SMALLEST, {"name": "schedule_free_adamw"}, marks=SLOW),
        pytest.param(SMALLEST, {"name": "sgd", "momentum": 0.9, "micro_batch": 2}, marks=SYSTEM),
        pytest.param({**SMALLEST, **OTHERS, **MORE}, {}, marks=SLOW),
        pytest.param(MORE, {"name": "sgd", "momentum": 0.9, "micro_batch": 2}, marks=SLOW),
    ],
    ids=["adamw", "schedule-free adamw", "sgd", "adamw, more", "sgd, more"],
)
def test_every_layout_makes_the_weights_of_one_rank(
    corpus: Corpus, tmp_path: Path, layouts: Layouts, optim: dict[str, Any]
) -> None:
    _hold(corpus, tmp_path, layouts, **optim)


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(SMALLEST, marks=SYSTEM),
        pytest.param({**OTHERS, **MORE}, marks=SLOW),
    ],
    ids=["smallest", "more"],
)
def test_a_resnet_is_the_same_on_any_ranks(tmp_path: Path, layouts: Layouts) -> None:
    pictures = write_pictures(tmp_path / "images" / "pictures")
    network = write_network(tmp_path / "network", "resnet")
    runs = {}
    for name, (processes, parallel) in {"alone": (1, {}), **layouts}.items():
        sections = _image_sections(processes, parallel)
        runs[name] = make_image_run(tmp_path / name, pictures, network, sections)
        run_on_ranks(train_here, processes, runs[name])
        assert _outcome(runs["alone"], runs[name]) == "equal", name


def _train_draining_at(run_dir: RunDir, attempt: int, step: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= step and dist.get_rank() == 0

    return train(run_dir, attempt, Hooks(
        generation=0, drain_requested=drain_requested, events=None
    ))  # fmt: skip


@pytest.mark.system
def test_a_run_that_changes_its_size_is_the_run_left_alone(corpus: Corpus, tmp_path: Path) -> None:
    alone = make_run(tmp_path / "alone", corpus, _sections(1, {}))
    run_on_ranks(train_here, 1, alone)
    moved = make_run(tmp_path / "moved", corpus, _sections(3, {"strategy": "FULL_SHARD"}))
    assert set(run_on_ranks(_train_draining_at, 3, moved, 0, 1)) == {DRAINED}
    make_run(moved.path, corpus, _sections(2, {"strategy": "ZERO_1"}), attempt=1)
    assert set(run_on_ranks(_train_draining_at, 2, moved, 1, 2)) == {DRAINED}
    make_run(moved.path, corpus, _sections(4, {"strategy": "SHARD_GRAD_OP"}), attempt=2)
    assert set(run_on_ranks(train_here, 4, moved, 2)) == {FINISHED}
    assert _outcome(alone, moved) == "equal", compare_bits(alone, moved).why


@pytest.mark.system
def test_a_resume_keeps_the_micro_batch(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, _sections(1, {}))
    run_on_ranks(_train_draining_at, 1, run_dir, 0, 1)
    make_run(run_dir.path, corpus, _sections(1, {}, micro_batch=2), attempt=1)
    with pytest.raises(RuntimeError, match=r"optim\.micro_batch.*adds up micro-batches"):
        run_on_ranks(train_here, 1, run_dir, 1)
