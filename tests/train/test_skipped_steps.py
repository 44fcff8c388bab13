"""A state that is not finite never becomes a checkpoint, and costs no sound one its place."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.checkpoint.load import load_tensors
from shardyard.checkpoint.snapshots.slot import read_slot
from shardyard.checkpoint.verify import read_manifest
from shardyard.config.formulas import slot_labels
from shardyard.errors import TrainingError
from shardyard.rundir.jsonl import EventWriter, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Faults, Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.checkpoint.kept_memory import FolderMemory
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run

pytestmark = pytest.mark.heavy

STEPS = 6


@dataclass(frozen=True)
class Told:
    """What became of one training."""

    outcome: str
    """Or the message of its TrainingError."""
    steps: list[int]
    """Of the checkpoints that are there."""
    latest: str
    abandoned: list[dict[str, Any]] = field(repr=False)


def made(folder: Path, corpus: Corpus, *, attempt: int = 0, **checkpoint: Any) -> RunDir:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "optim": {"max_skipped_steps": 2},
        "checkpoint": {"every": 2, "keep_last": 2, **checkpoint},
    }
    return make_run(folder, corpus, sections, attempt=attempt)


def train_with(run: RunDir, faults: Faults, attempt: int = 0, drain_at: int | None = None) -> Told:
    """Train this rank's part."""
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls == drain_at

    events = EventWriter(run.events, attempt=attempt, generation=0)
    hooks = Hooks(generation=0, drain_requested=drain_requested, events=events, faults=faults)
    try:
        outcome = train(run, attempt, hooks)
    except TrainingError as error:
        outcome = str(error)
    latest = run.latest.read_text().strip() if run.latest.exists() else ""
    abandoned = [line for line in read_lines(run.events) if line["kind"] == "checkpoint_abandoned"]
    return Told(outcome, run.checkpoint_steps(), latest, abandoned)


def each(calls: list[tuple[Any, ...]]) -> list[Told]:
    """Several trainings in one process."""
    return [train_with(*call) for call in calls]


def gradient(*steps: int) -> Faults:
    return Faults(gradient_steps=frozenset(steps))


def weight(*steps: int) -> Faults:
    return Faults(weight_steps=frozenset(steps))


def test_a_save_that_is_due_in_a_skipped_step_waits_for_one_that_is_taken(
    corpus: Corpus, tmp_path: Path
) -> None:
    periodic = made(tmp_path / "periodic", corpus, keep_last=9)
    drained = made(tmp_path / "drained", corpus, every=100)
    told = run_on_ranks(each, 1, [(periodic, gradient(2, 3)), (drained, gradient(3), 0, 3)])[0]
    assert (told[0].outcome, told[0].steps) == (FINISHED, [4, 6])
    assert (told[1].outcome, told[1].steps) == (DRAINED, [4])


def test_the_last_step_of_a_run_is_saved_though_skipped_and_removes_nothing(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = made(tmp_path / "run", corpus, keep_last=1)
    told = run_on_ranks(train_with, 1, run, gradient(STEPS))[0]
    assert (told.outcome, told.steps) == (FINISHED, [4, 6])


def train_with_snapshots(run: RunDir, memory: FolderMemory, faults: Faults) -> set[int]:
    """Train; the steps of the snapshots in memory after each step."""
    taken: set[int] = set()

    def looked() -> bool:
        pieces = [memory(label) for label in slot_labels(0)]
        slots = [read_slot(piece) for piece in pieces if piece is not None]
        taken.update(slot.snapshot_id.step for slot in slots if slot is not None)
        return False

    hooks = Hooks(generation=0, drain_requested=looked, events=None, faults=faults, memory=memory)
    train(run, 0, hooks)
    looked()
    return taken


def test_no_snapshot_is_taken_while_steps_are_skipped(corpus: Corpus, tmp_path: Path) -> None:
    sections = {
        "run": {"steps": STEPS}, "elastic": {"snapshot_every": 1}, "checkpoint": {"every": 100},
        "optim": {"ema_decay": 0.5},
    }  # fmt: skip
    run = make_run(tmp_path / "run", corpus, sections)
    memory = FolderMemory(tmp_path)
    taken = run_on_ranks(train_with_snapshots, 1, run, memory, gradient(2, 4))[0]
    assert taken == {1, 3, 5, 6}
    steps = {"average.steps": torch.zeros(())}
    load_tensors(run.checkpoint(STEPS), steps, allow_extra=True)
    assert steps["average.steps"] == STEPS - 2  # averages stand still as well


def test_skipped_steps_are_counted_on_in_a_resume(corpus: Corpus, tmp_path: Path) -> None:
    def part(attempt: int, steps: int) -> RunDir:
        sections = {
            "run": {"steps": steps},
            "optim": {"max_skipped_steps": 1, "decay_steps": 4},
        }
        return make_run(tmp_path / "run", corpus, sections, attempt=attempt)

    run = part(0, 2)
    part(1, 4)
    first, second = run_on_ranks(each, 1, [(run, gradient(2)), (run, gradient(3), 1)])[0]
    assert (first.outcome, first.steps) == (FINISHED, [2])
    assert "2 steps in a row were skipped" in second.outcome


def test_a_weight_that_is_not_finite_is_named_and_the_run_resumes_from_before_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    calm, hurt = made(tmp_path / "calm", corpus), made(tmp_path / "hurt", corpus)
    two: dict[str, Any] = {"cluster": {"devices": 2}, "optim": {"max_skipped_steps": 1}}
    two |= {"run": {"steps": STEPS}, "checkpoint": {"every": 2}}
    for run in (calm, hurt):
        make_run(run.path, corpus, two)
    make_run(hurt.path, corpus, two, attempt=1)
    run_on_ranks(train_with, 2, calm, Faults())
    told = run_on_ranks(train_with, 2, hurt, weight(4))
    assert told[0].outcome == told[1].outcome
    assert "step 4 was not saved, as the state is not finite: rank 0: model." in told[0].outcome
    assert "The newest checkpoint is from step 2 and finite. Resume the run" in told[0].outcome
    assert (told[0].steps, told[0].latest) == ([2], "step-00000002")
    assert told[0].abandoned[0]["step"] == 4
    name = "model.model.embed_tokens.weight"
    assert told[0].abandoned[0]["reason"] == f"rank 0: {name} holds NaN; rank 1: {name} holds NaN"
    assert list(hurt.checkpoints.glob("*.tmp")) == []
    again = run_on_ranks(train_with, 2, hurt, Faults(), 1)[0]
    assert again.outcome == FINISHED
    digests = [read_manifest(run.checkpoint(STEPS)).files for run in (calm, hurt)]
    assert digests[0] == digests[1]


def test_a_drain_and_an_end_with_a_state_that_is_not_finite_leave_the_sound_checkpoint(
    corpus: Corpus, tmp_path: Path
) -> None:
    drained = made(tmp_path / "drained", corpus)
    ended = made(tmp_path / "ended", corpus)
    told = run_on_ranks(each, 1, [(drained, weight(3), 0, 3), (ended, weight(STEPS))])[0]
    assert (told[0].outcome, told[0].latest) == (DRAINED, "step-00000002")
    assert told[0].abandoned[0]["step"] == 3
    assert "step 6 was not saved, as the state is not finite: rank 0: model." in told[1].outcome
    assert "The newest checkpoint is from step 4" in told[1].outcome
    assert told[1].steps == [2, 4]


def test_an_evaluation_that_is_not_finite_is_never_the_best(corpus: Corpus, tmp_path: Path) -> None:
    run = made(tmp_path / "run", corpus)
    sections = {
        "run": {"steps": STEPS},
        "task": {"eval_every_steps": 1},
        "optim": {"max_skipped_steps": 1},
        "checkpoint": {"every": 100},
    }
    make_run(run.path, corpus, sections)
    told = run_on_ranks(train_with, 1, run, weight(1))[0]
    assert "No checkpoint was saved yet." in told.outcome
    assert not run.best.exists()
