"""Phases of a run: weights go on, the optimizer begins anew, and no kill changes a bit."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter, read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

SECTIONS: dict[str, Any] = {
    "run": {"steps": None},
    "model": {"dropout": 0.1},
    "data": {"seq_len": "auto"},
    "task": {"eval_every_steps": 2},
    "checkpoint": {"every": 2, "keep_last": 9},
    "optim": {"warmup_steps": "auto", "global_batch": "auto", "lr": "auto", "schedule": "linear"},
    "phases": [
        {
            "run": {"steps": 3},
            "data": {"seq_len": 32},
            "optim": {"lr": 1e-2, "global_batch": 6, "warmup_steps": 1},
        },
        {
            "run": {"steps": 3},
            "data": {"seq_len": 64},
            "optim": {"lr": 1e-3, "global_batch": 4, "warmup_steps": 0, "name": "lamb"},
        },
    ],
}
LAST = 6


def _train_to(run_dir: RunDir, steps: int) -> str:
    """Train until a drain after so many steps, counted over phases; with events."""
    asked = 0

    def drain_requested() -> bool:
        nonlocal asked
        asked += 1
        return asked >= steps

    import torch.distributed as dist

    events = None
    if dist.get_rank() == 0:
        events = EventWriter(run_dir.events, attempt=0, generation=0)
    hooks = Hooks(generation=0, drain_requested=drain_requested, events=events)
    return train(run_dir, 0, hooks)


def _digests(run_dir: RunDir) -> dict[str, str]:
    files = sorted(run_dir.checkpoint(LAST).glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of both phases that nobody disturbs."""
    run_dir = make_run(tmp_path_factory.mktemp("whole") / "run", corpus, SECTIONS)
    assert run_on_ranks(_train_to, 2, run_dir, 99) == [FINISHED] * 2
    return run_dir


def test_a_run_of_two_phases_is_one_run(whole: RunDir) -> None:
    lines = read_steps(whole.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["phase"] for line in lines] == [1, 1, 1, 2, 2, 2]
    assert [line["samples"] for line in lines] == [6, 12, 18, 22, 26, 30]
    # each phase has a schedule of its own, and reads its data from the beginning
    assert [line["lr"] for line in lines] == pytest.approx(
        [1e-2, 0.55e-2, 1e-3, 0.7e-3, 0.4e-3, 0.1e-3]
    )
    assert lines[3]["epoch"] < lines[2]["epoch"]
    assert [line["step"] for line in read_evaluations(whole.metrics)] == [2, 3, 4, 6]
    told = [e for e in read_lines(whole.events) if e["kind"] == "phase_started"]
    assert [(e["phase"], e["step"], e["seq_len"]) for e in told] == [(1, 0, 32), (2, 3, 64)]
    assert told[1]["seconds"] > 0 == told[0]["seconds"]
    ready = [e for e in read_lines(whole.events) if e["kind"] == "model_ready"]
    assert [event["last_step"] for event in ready] == [6, 6]
    assert len([e for e in read_lines(whole.events) if e["kind"] == "run_finished"]) == 1


def _tensors(run_dir: RunDir, step: int, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(
        run_dir.checkpoint(step) / f"rank-{rank:05d}.safetensors"
    )
    return found


def test_weights_go_on_and_the_optimizer_begins_anew(whole: RunDir) -> None:
    found = {name: value for rank in (0, 1) for name, value in _tensors(whole, 6, rank).items()}
    counts = {float(found[name]) for name in found if name.startswith("optim.step.")}
    assert counts == {3.0}  # of the second phase alone
    before, after = _tensors(whole, 3, 0), _tensors(whole, 4, 0)
    norms = [name for name in after if name.startswith("model.") and name.endswith("norm.weight")]
    # without a ratio for norms, a first step of LAMB moves by the rate at most
    assert norms and all((after[n] - before[n]).abs().max() <= 0.71e-3 for n in norms)


# in each phase; at the last step of the first, when the drain is seen in the second; at the end
@pytest.mark.parametrize(
    "steps", [3, *(pytest.param(n, marks=pytest.mark.system) for n in (1, 4, 5))]
)
def test_a_run_that_is_drained_anywhere_ends_in_the_same_bits(
    steps: int, whole: RunDir, corpus: Corpus, tmp_path: Path
) -> None:
    parts = make_run(tmp_path / "parts", corpus, SECTIONS)
    assert run_on_ranks(_train_to, 2, parts, steps) == [DRAINED] * 2
    assert run_on_ranks(train_here, 2, parts, 0) == [FINISHED] * 2
    assert _digests(parts) == _digests(whole)
    assert [line["loss"] for line in read_steps(parts.metrics)] == [
        line["loss"] for line in read_steps(whole.metrics)
    ]


# killed during the first save of phase 2; between the phases; in phase 1
@pytest.mark.parametrize("kept", [3, pytest.param(2, marks=pytest.mark.system)])
def test_a_run_that_lost_what_came_after_a_checkpoint_ends_in_the_same_bits(
    kept: int, whole: RunDir, tmp_path: Path
) -> None:
    parts = RunDir(tmp_path / "parts")
    shutil.copytree(whole.path, parts.path)
    for step in (2, 3, 4, 6):
        if step > kept:
            shutil.rmtree(parts.checkpoint(step))
    torn = parts.checkpoints / "step-00000004.tmp"
    torn.mkdir()
    (torn / "rank-00000.safetensors").write_bytes(b"torn")
    assert run_on_ranks(train_here, 2, parts, 0) == [FINISHED] * 2
    assert _digests(parts) == _digests(whole)


def test_a_phase_may_go_on_in_another_layout(whole: RunDir, corpus: Corpus, tmp_path: Path) -> None:
    parts = make_run(tmp_path / "parts", corpus, SECTIONS)
    assert run_on_ranks(_train_to, 1, parts, 3) == [DRAINED]
    make_run(parts.path, corpus, SECTIONS, attempt=1, previous=read_resolved(parts.resolved(0)))
    assert run_on_ranks(train_here, 3, parts, 1) == [FINISHED] * 3
    losses = [[line["loss"] for line in read_steps(run.metrics)] for run in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_values_of_a_checkpoint_say_its_phase(whole: RunDir) -> None:
    progress = [
        json.loads((whole.checkpoint(step) / "values.json").read_text())["progress"]
        for step in (3, 4)
    ]
    assert [(p["phase"], p["position"], p["samples_before"]) for p in progress] == [
        (0, 18, 0),
        (1, 4, 18),
    ]


@pytest.mark.system
def test_a_phase_begins_with_the_average_of_a_schedule_free_one(
    corpus: Corpus, tmp_path: Path
) -> None:
    first, second = (
        {"run": {"steps": steps}, "data": {"seq_len": 32}, "optim": {"global_batch": 6, **optim}}
        for steps, optim in (
            (3, {"name": "schedule_free_adamw", "lr": 1e-2, "warmup_steps": 1}),
            (1, {"name": "sgd", "lr": 1e-12, "warmup_steps": 0}),
        )
    )
    optim = {**SECTIONS["optim"], "schedule": "constant"}
    run_dir = make_run(tmp_path, corpus, {**SECTIONS, "optim": optim, "phases": [first, second]})
    assert run_on_ranks(_train_to, 1, run_dir, 99) == [FINISHED]
    before, after = _tensors(run_dir, 3, 0), _tensors(run_dir, 4, 0)
    names = [name for name in after if name.startswith("model.")]
    for name in names:
        trained, other = before[name], before[f"optim.z.{name.removeprefix('model.')}"]
        averaged = (trained - 0.1 * other) / 0.9
        torch.testing.assert_close(after[name], averaged, rtol=1e-5, atol=1e-6)
    assert any((after[name] - before[name]).abs().max() > 1e-3 for name in names)
