"""A run of eight steps with a resume in it, worked out by hand: what is saved, what is the best."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.config.tasks import TASKS
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train import loop, run
from shardyard.train.evaluate import Evaluation
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.checkpoint.kept_memory import FolderMemory
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

pytestmark = pytest.mark.heavy

LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0}
"""What the evaluations of the run are made to find, by step; the best is in its first part."""
DRAINED_AT = 5


def _train_in_two_parts(run_dir: RunDir) -> list[tuple[str, str | None]]:
    """Of each part: how it ended, and what ``best`` named then."""
    losses = iter(LOSSES.values())
    loop.evaluate = lambda *_, **__: Evaluation(scores={"loss": next(losses)}, targets=1)  # type: ignore[attr-defined]
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls == DRAINED_AT

    found = []
    for attempt in range(2):
        hooks = Hooks(generation=0, drain_requested=drain_requested, events=None)
        outcome = train(run_dir, attempt, hooks)
        found.append((outcome, run_dir.best.read_text().strip() if run_dir.best.exists() else None))
    return found


def test_saves_evaluations_and_the_best_are_those_of_the_settings_also_after_a_resume(
    corpus: Corpus, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 8},
        "task": {"eval_every_steps": 2},
        "checkpoint": {"every": 3, "keep_last": 9},
    }
    run_dir = make_run(tmp_path / "run", corpus, sections)
    make_run(run_dir.path, corpus, sections, attempt=1)
    parts = run_on_ranks(_train_in_two_parts, 1, run_dir)[0]
    assert parts == [(loop.DRAINED, "step-00000004"), (loop.FINISHED, "step-00000004")]
    assert {line["step"]: line["eval"]["loss"] for line in read_evaluations(run_dir.metrics)} == (
        LOSSES
    )
    # every third; the two that were the best so far; the drained one; the last
    assert run_dir.checkpoint_steps() == [2, 3, 4, 5, 6, 8]
    assert run_dir.latest.read_text().strip() == "step-00000008"


class _KilledError(Exception):
    """Stands for a kill."""


def _train_until_killed(
    run_dir: RunDir, memory: FolderMemory, begun: int, killed_in: int | None
) -> str:
    """Train from a step on, with the losses above, until a later step begins."""
    step = begun

    def drain_requested() -> bool:
        nonlocal step
        step += 1
        if step == killed_in:
            raise _KilledError
        return False

    loop.evaluate = lambda *_, **__: Evaluation(scores={"loss": LOSSES[step]}, targets=1)  # type: ignore[attr-defined]
    hooks = Hooks(
        generation=int(begun > 0), drain_requested=drain_requested, events=None, memory=memory
    )
    try:
        return train(run_dir, 0, hooks)
    except _KilledError:
        return "killed"


@pytest.mark.parametrize(
    ("killed_in", "is_saved", "best"),
    [
        (5, False, 4),  # while the best is written: it is written again from memory
        (5, True, 4),  # before ``best`` names it
        (6, False, 6),  # its weights are gone, and those of step 2 are judged worse than step 6
    ],
)
def test_the_best_after_a_kill_is_a_checkpoint_that_is_there(
    corpus: Corpus, tmp_path: Path, killed_in: int, is_saved: bool, best: int
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 8},
        "task": {"eval_every_steps": 2},
        "checkpoint": {"every": 100, "keep_last": 9},
        "elastic": {"snapshot_every": 1},
    }
    run_dir, memory = make_run(tmp_path / "run", corpus, sections), FolderMemory(tmp_path)
    assert run_on_ranks(_train_until_killed, 1, run_dir, memory, 0, killed_in) == ["killed"]
    assert run_dir.best.read_text().strip() == "step-00000004"
    run_dir.best.write_text("step-00000002\n")
    run_dir.latest.write_text("step-00000002\n")
    if not is_saved:
        run_dir.checkpoint(4).rename(run_dir.checkpoints / "step-00000004.tmp")
    found = run_on_ranks(_train_until_killed, 1, run_dir, memory, killed_in - 1, None)
    assert found == [loop.FINISHED]
    assert run_dir.best.read_text().strip() == run_dir.checkpoint(best).name
    assert best in run_dir.checkpoint_steps()


TOLD = [{"loss": 2.0, "perplexity": 9.0}, {"loss": 4.0, "perplexity": 3.0},
        {"loss": 2.0, "perplexity": 3.0}, {"loss": 1.0, "perplexity": 1.0}]  # fmt: skip


def _train_to_targets(run_dir: RunDir) -> str:
    scores = iter(TOLD)
    loop.evaluate = lambda *_, **__: Evaluation(scores=next(scores), targets=1)  # type: ignore[attr-defined]
    return train(run_dir, 0, Hooks(generation=0, drain_requested=lambda: False, events=None))


def _train_killed_at_the_end(run_dir: RunDir) -> str:
    def finish(*_: Any, **__: Any) -> None:
        raise _KilledError

    finishes, run.finish = run.finish, finish
    with pytest.raises(_KilledError):
        _train_to_targets(run_dir)
    run.finish = finishes
    return _train_to_targets(run_dir)


def test_a_run_ends_early_once_every_target_is_reached_in_one_evaluation(
    corpus: Corpus, tmp_path: Path
) -> None:
    facts = corpus.facts
    per_byte = TASKS["causal_lm"].bits_per_byte(2.5, targets=1, nbytes=facts.eval_bytes)
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 8, "target": {"bits_per_byte": per_byte, "perplexity": 3.5}},
        "task": {"eval_every_steps": 2},
    }
    run_dir = make_run(tmp_path / "run", corpus, sections)
    # as well where it is killed after its last step: it then takes no other
    assert run_on_ranks(_train_killed_at_the_end, 1, run_dir) == [loop.FINISHED]
    assert [line["step"] for line in read_evaluations(run_dir.metrics)] == [2, 4, 6]
    assert [line["step"] for line in read_steps(run_dir.metrics)] == list(range(1, 7))


def test_a_run_ends_after_as_many_evaluations_without_a_better_one_as_it_has_patience_for(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Against the rule of transformers' EarlyStoppingCallback, over the whole run's losses."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 30},
        "task": {"eval_every_steps": 1},
        "optim": {"lr": 0.05, "schedule": "constant", "warmup_steps": 0},
    }
    whole = make_run(tmp_path / "whole", corpus, sections)
    run_on_ranks(train_here, 1, whole)
    losses = [line["eval"]["loss"] for line in read_evaluations(whole.metrics)]
    for patience in (1, 2):
        best, waited, ends_at = float("inf"), 0, None
        for step, loss in enumerate(losses, 1):
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited == patience:
                ends_at = step
                break
        assert ends_at is not None and ends_at < 30, losses
        sections["run"]["patience"] = patience
        folder = tmp_path / f"patient-{patience}"
        run_dir = make_run(folder, corpus, sections)
        # drained and killed in between, its count of evaluations is that of the checkpoint
        assert run_on_ranks(_train_drained, 1, run_dir, 0, ends_at - 1) == [loop.DRAINED]
        make_run(folder, corpus, sections, attempt=1)
        assert run_on_ranks(_train_drained, 1, run_dir, 1, 99) == [loop.FINISHED]
        assert [line["step"] for line in read_steps(run_dir.metrics)] == [*range(1, ends_at + 1)]
        found = [line["eval"]["loss"] for line in read_evaluations(run_dir.metrics)]
        assert found == losses[:ends_at]


def _train_drained(run_dir: RunDir, attempt: int, drain_at: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= drain_at

    hooks = Hooks(generation=0, drain_requested=drain_requested, events=None)
    return run.train(run_dir, attempt, hooks)
