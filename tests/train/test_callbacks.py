"""Callbacks of the user's own: what they get, when they fail, and when they are slow."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.rules.own_code import CALLBACK
from shardyard.observe import callbacks
from shardyard.observe.callbacks import Callbacks
from shardyard.own_code import load_own
from shardyard.rundir.jsonl import EventWriter, read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus

OWN = "tests.train.own_functions"


def _of(name: str) -> Any:
    return load_own("observe.callbacks", f"{OWN}:{name}", CALLBACK)


def _reasons(events: Path) -> list[str]:
    found = (line for line in read_lines(events) if line["kind"] == "callback_failed")
    return [line["reason"] for line in found]


def test_the_first_error_is_reported_with_its_line_and_the_number_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, generation=0)
    calls = Callbacks([_of("fails_at_steps"), _of("recorded")], events)
    for step in (1, 2, 3):
        calls.write({"step": step, "loss": 2.0})
    calls.write({"step": 3, "eval": {"loss": 1.0}})
    calls.saved(3, tmp_path / "step-3")
    calls.close()
    first, last = _reasons(tmp_path / "events.jsonl")
    assert "observe.callbacks=" in first and "own_functions.py:" in first
    assert "ValueError: no step 1, please." in first and first.endswith("so do the calls.")
    assert last == f"{OWN}:fails_at_steps failed 3 times in all."
    lines = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert lines == [
        *(["step", {"step": step, "loss": 2.0}] for step in (1, 2, 3)),
        ["evaluation", {"step": 3, "eval": {"loss": 1.0}}],
        ["checkpoint", {"step": 3, "path": str(tmp_path / "step-3")}],
    ]


def test_a_slow_callback_holds_no_step_and_what_is_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_MOST_WAITING", 2)
    monkeypatch.setattr(callbacks, "_CLOSE_S", 0.1)
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, generation=0)
    calls = Callbacks([_of("slow")], events)
    calls.write({"step": 0})
    while calls._calls.qsize():  # until the first is called
        time.sleep(0.01)
    began = time.monotonic()
    for step in range(1, 20):
        calls.write({"step": step})
    calls.close()
    assert time.monotonic() - began < 2.0, "a callback that does not return holds nothing"
    (reason,) = _reasons(tmp_path / "events.jsonl")
    assert reason.startswith("calls dropped: 19, because they took longer than the steps.")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def _train(run_dirs: list[RunDir], calls: str) -> None:
    os.environ["CALLS"] = calls
    for run_dir in run_dirs:
        events = EventWriter(run_dir.events, attempt=0, generation=0)
        train(run_dir, 0, Hooks(generation=0, drain_requested=lambda: False, events=events))


@pytest.mark.heavy
def test_calls_have_the_lines_of_the_run_which_learns_the_same(
    corpus: Corpus, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 6}, "task": {"eval_every_steps": 2}, "checkpoint": {"every": 3},
    }  # fmt: skip
    plain = make_run(tmp_path / "plain", corpus, sections)
    sections["observe"] = {"callbacks": [f"{OWN}:fails_at_steps", f"{OWN}:recorded"]}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(_train, 1, [plain, run_dir], str(tmp_path / "calls"))
    found = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    by_kind = {
        kind: [values for each, values in found if each == kind]
        for kind in ("step", "evaluation", "checkpoint")
    }
    assert by_kind["step"] == read_steps(run_dir.metrics)
    assert by_kind["evaluation"] == read_evaluations(run_dir.metrics)
    assert {Path(each["path"]).name for each in by_kind["checkpoint"]} >= {"step-00000006"}
    losses = [[line["loss"] for line in read_steps(each.metrics)] for each in (plain, run_dir)]
    assert losses[0] == losses[1]
    assert len(_reasons(run_dir.events)) == 2
