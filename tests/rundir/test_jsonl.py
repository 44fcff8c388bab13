"""What is read of events.jsonl and metrics.jsonl where something else has written there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardyard.launchers.ledger import Ledger
from shardyard.rundir.jsonl import LineWriter, read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import read_state

ODD_METRICS: list[Any] = [
    {"step": 5, "loss": "x"},
    {"step": "5", "loss": 1.0},
    {"step": 5.5, "loss": 1.0},
    {"step": True},
    {"loss": 1.0},
    {"step": 5, "tokens_per_s": [1]},
    {"step": 5, "eval": 3},
    {"step": 5, "eval": {"loss": "low"}},
    {"step": 5, "eval": {"loss": 1.0}, "eval_sources": ["code"]},
    {"step": 5, "eval": {"loss": 1.0}, "eval_sources": {"code": 3}},
    {"step": 5, "eval": {"loss": 1.0}, "eval_sources": {"code": {"loss": "low"}}},
    [5],
    5,
]
ODD_EVENTS: list[Any] = [
    {"kind": 7},
    {"kind": ["attempt_started"]},
    {"kind": "attempt_ended", "exit_code": "0"},
    {"kind": "stalled", "t": "now", "seconds": 3},
]


def _run(tmp_path: Path, *, metrics: list[str], events: list[str]) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.metrics.write_text("\n".join(metrics) + "\n")
    run.events.write_text("\n".join(events) + "\n")
    return run


@pytest.mark.parametrize("odd", [*map(json.dumps, ODD_METRICS), "[" * 100_000, "{", "\0"])
def test_a_line_of_metrics_that_no_run_writes_is_passed_over(tmp_path: Path, odd: str) -> None:
    sound = json.dumps({"step": 4, "loss": None, "lr": 1e-3})
    scored = json.dumps({"step": 4, "eval": {"loss": 2.0}})
    run = _run(tmp_path, metrics=[odd, sound, scored, odd], events=['{"kind": "run_started"}'])
    assert [line["step"] for line in read_steps(run.metrics)] == [4]
    assert [line["eval"] for line in read_evaluations(run.metrics)] == [{"loss": 2.0}]
    assert (read_state(run).step, read_state(run).loss) == (4, None)


@pytest.mark.parametrize("odd", [*map(json.dumps, ODD_EVENTS), "[" * 100_000])
def test_an_event_that_nobody_writes_is_passed_over(tmp_path: Path, odd: str) -> None:
    ended = '{"kind": "attempt_ended", "exit_code": 1, "t": 2.0}'
    run = _run(tmp_path, metrics=[], events=['{"kind": "attempt_started"}', odd, ended, odd])
    assert [event["kind"] for event in read_lines(run.events)] == [
        "attempt_started",
        "attempt_ended",
    ]
    assert read_state(run).state == "failed"


def test_an_event_that_lacks_what_it_tells_costs_no_list_of_runs(tmp_path: Path) -> None:
    events = ['{"kind": "attempt_started"}', '{"kind": "stopping"}', '{"kind": "stalled"}']
    run = _run(tmp_path, metrics=[], events=events)
    state = read_state(run, is_training_remotely=True)
    assert (state.state, state.stop_reason, state.no_step_s) == ("running", None, None)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "ledger.jsonl"])
def test_a_copy_by_hard_links_does_not_append_to_the_original(tmp_path: Path, name: str) -> None:
    (tmp_path / "copy").mkdir()
    original, copy = tmp_path / name, tmp_path / "copy" / name
    line = {"t": 1.0, "action": "noted", "kind": "node", "name": "1", "launcher": "local"}
    original.write_text(json.dumps(line) + "\n")
    os.link(original, copy)
    if name == "ledger.jsonl":
        Ledger(copy).note("node", "2", launcher="local")
    else:
        writer = LineWriter(copy)
        writer.append({"step": 2})
        writer.close()
    assert original.read_text() == json.dumps(line) + "\n"
    assert copy.read_text().startswith(original.read_text())
    assert len(copy.read_bytes().splitlines()) == 2
