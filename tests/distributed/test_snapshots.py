"""A run that loses a process between checkpoints goes on from memory, as if nothing had been."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardyard.control.follow import describe_event
from shardyard.rundir.jsonl import EventWriter, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.intervals import FIRST_EVERY
from shardyard.train.run import train
from tests.checkpoint.kept_memory import FolderMemory
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus

STEPS, EVERY, LOST_AFTER = 9, 2, 7


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


class LostError(Exception):
    """Stands for a kill."""


@dataclass
class _LoseAfter:
    """A wish to drain that ends the process instead, once so many steps were begun."""

    steps: int
    calls: int = 0

    def __call__(self) -> bool:
        self.calls += 1
        if self.calls > self.steps:
            raise LostError
        return False


def _train(run_dir: RunDir, memory: FolderMemory, generation: int, lost_after: int) -> str:
    """One generation: to the end, or until all ranks are lost."""
    events = EventWriter(run_dir.events, attempt=0, generation=generation)
    hooks = Hooks(
        generation=generation,
        drain_requested=_LoseAfter(lost_after),
        events=events if dist.get_rank() == 0 else None,
        memory=memory,
    )
    try:
        return train(run_dir, 0, hooks)
    except LostError:
        return "lost"


def _weights(run_dir: RunDir) -> dict[str, bytes]:
    """Files of the last checkpoint."""
    folder = run_dir.checkpoint(STEPS)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@dataclass
class Run:
    run_dir: RunDir
    memory: FolderMemory

    def train(self, generation: int = 0, *, lost_after: int = 10**6) -> str:
        answers = run_on_ranks(_train, 2, self.run_dir, self.memory, generation, lost_after)
        assert len(set(answers)) == 1
        return str(answers[0])

    def losses(self) -> dict[int, float]:
        """By step; of a step that was done again the last."""
        return {line["step"]: line["loss"] for line in read_steps(self.run_dir.metrics)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in read_lines(self.run_dir.events) if each["kind"] == kind]


def _begin(
    corpus: Corpus, folder: Path, *, save_every: int | str = 1000, every: int | str | None = EVERY,
    steps: int = STEPS,
) -> Run:  # fmt: skip
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": steps},
        "model": {"preset": "llama-tiny", "dropout": 0.1},
        "task": {"eval_every_steps": None},
        "parallel": {"strategy": "FULL_SHARD"},
        "cluster": {"devices": 2},
        "checkpoint": {"every": save_every},
        "elastic": {"snapshot_every": every},
    }
    memory = folder / "memory"
    memory.mkdir()
    return Run(make_run(folder / "run", corpus, sections), FolderMemory(memory))


@pytest.fixture(scope="module")
def undisturbed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = _begin(corpus, tmp_path_factory.mktemp("undisturbed"))
    assert run.train() == "finished"
    return run


def test_a_lost_process_costs_no_more_than_the_steps_since_the_last_snapshot(
    undisturbed: Run, corpus: Corpus, tmp_path: Path
) -> None:
    run = _begin(corpus, tmp_path, save_every=4)
    assert run.train(lost_after=LOST_AFTER) == "lost"
    # the checkpoint of step 4 is there, and must not be read
    for file in run.run_dir.checkpoint(4).glob("*.safetensors"):
        file.write_bytes(b"damaged")
    assert run.train(generation=1) == "finished"
    (restored,) = run.events("snapshot_restored")
    assert (restored["step"], restored["source"], restored["taken_in"]) == (6, "agent", 0)
    assert describe_event(restored) == "continuing from step 6, whose state was in memory"
    assert not run.events("checkpoint_loaded")
    assert run.losses() == undisturbed.losses()
    assert _weights(run.run_dir) == _weights(undisturbed.run_dir)


@pytest.mark.system
def test_a_damaged_snapshot_is_told_and_the_next_source_is_taken(
    undisturbed: Run, corpus: Corpus, tmp_path: Path
) -> None:
    run = _begin(corpus, tmp_path)
    assert run.train(lost_after=LOST_AFTER) == "lost"
    # 2, 4 and 6 lie in the slots of each rank in this order
    run.memory.flip_a_bit("snapshot_1_2")
    assert run.train(generation=1, lost_after=1) == "lost"
    (restored,) = run.events("snapshot_restored")
    assert restored["step"] == 4
    assert str(describe_event(restored)).endswith(
        "; the snapshot of step 6 is damaged and was passed over (what rank 1 held differs from "
        "its checksum)"
    )
    for number in range(3):
        run.memory.flip_a_bit(f"snapshot_0_{number}")
    assert run.train(generation=2) == "finished"  # from the beginning: there is no checkpoint
    assert len(run.events("snapshot_restored")) == 1
    assert run.losses() == undisturbed.losses()
    assert _weights(run.run_dir) == _weights(undisturbed.run_dir)


@pytest.mark.system
def test_a_save_that_a_loss_cut_off_is_made_up_from_the_snapshot(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = _begin(corpus, tmp_path, save_every=4)
    assert run.train(lost_after=6) == "lost"
    checkpoint = run.run_dir.checkpoint(4)
    checkpoint.rename(checkpoint.with_name("step-00000004.tmp"))
    run.run_dir.latest.unlink()
    assert run.train(generation=1, lost_after=1) == "lost"
    assert [event["step"] for event in run.events("snapshot_restored")] == [6]
    assert [event["step"] for event in run.events("checkpoint_started")] == [4, 6]


@pytest.mark.system
def test_auto_begins_ten_steps_apart_and_then_follows_what_a_copy_costs(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = _begin(corpus, tmp_path, every="auto", steps=60)
    assert run.train(lost_after=25) == "lost"
    (moved,) = run.events("snapshot_interval")
    assert moved["step"] == 20 and moved["every"] > 15 and moved["mtbf_s"] == 86_400
    assert run.train(generation=1, lost_after=1) == "lost"
    assert [event["step"] for event in run.events("snapshot_restored")] == [20]


@pytest.mark.system
def test_auto_saves_soon_then_as_a_save_costs_and_a_restart_keeps_to_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = _begin(corpus, tmp_path, save_every="auto", every=None, steps=40)
    plan = run.run_dir.plan(0)
    outlook = {"checkpoint_mtbf_s": 1e9}
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "failures": outlook}))
    assert run.train(lost_after=22) == "lost"
    (moved,) = run.events("checkpoint_interval")
    assert moved["every"] > 40 and moved["step"] > FIRST_EVERY
    assert str(describe_event(moved)).startswith("a checkpoint every ")
    assert run.train(generation=1, lost_after=10) == "lost"
    assert [event["step"] for event in run.events("checkpoint_started")] == [FIRST_EVERY]
