"""What state a run is in, told from its events and its lease."""

import json
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease, is_locked
from shardyard.rundir.state import ExcludedNode, read_state, state_of

STARTED = {"kind": "attempt_started"}
DRAINING = {"kind": "draining"}
FINISHED = {"kind": "run_finished"}


def ended(exit_code: int) -> dict[str, object]:
    return {"kind": "attempt_ended", "exit_code": exit_code}


STATES = [
    ([], False, "new"),
    ([], True, "running"),
    ([STARTED], True, "running"),
    ([STARTED], False, "lost"),
    ([STARTED, DRAINING], True, "draining"),
    ([STARTED, DRAINING, ended(143)], False, "drained"),
    ([STARTED, DRAINING, ended(130)], False, "drained"),
    ([STARTED, DRAINING, ended(143), STARTED], True, "running"),
    ([STARTED, ended(1)], False, "failed"),
    ([STARTED, ended(1), STARTED], False, "lost"),
    ([STARTED, FINISHED, ended(0)], False, "finished"),
    ([STARTED, FINISHED, ended(0), STARTED, ended(1)], False, "failed"),
    ([STARTED, FINISHED, ended(0), STARTED], False, "lost"),
    ([STARTED, DRAINING, {**ended(143), "outcome": "failed"}], False, "failed"),
    ([STARTED, DRAINING, {**ended(143), "outcome": "drained"}], False, "drained"),
]


@pytest.mark.parametrize(("events", "is_leased", "state"), STATES)
def test_a_state_follows_from_events_and_lease(
    events: list[dict[str, object]], is_leased: bool, state: str
) -> None:
    assert state_of(events, is_leased=is_leased) == state


def test_a_lease_is_seen_without_being_taken(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    assert not is_locked(path)
    lease = Lease(path)
    assert is_locked(path)
    lease.close()
    assert not is_locked(path)
    Lease(path).close()


def test_a_limit_reached_before_the_attempt_has_started_is_why_it_stopped(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "dear")
    run_dir.path.mkdir()
    events = [
        {"kind": "stopping", "attempt": 0, "reason": "it has cost $9.00"},
        {**ended(143), "attempt": 0},
        {"kind": "stopping", "attempt": 1, "reason": "it has cost $10.00"},
        {**STARTED, "attempt": 1},
        {**ended(143), "attempt": 1},
    ]
    run_dir.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    state = read_state(run_dir)
    assert (state.state, state.stop_reason) == ("drained", "it has cost $10.00")
    run_dir.events.write_text(
        "".join(json.dumps(event) + "\n" for event in events[:2] + events[3:])
    )
    assert read_state(run_dir).stop_reason is None


def test_a_row_shows_the_last_step(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a-run")
    run_dir.path.mkdir()
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 2, "eval": {"loss": 2.0}}]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir.events.write_text(json.dumps(STARTED) + "\n")
    row = read_state(run_dir)
    assert (row.id, row.state, row.step, row.loss) == ("a-run", "lost", 2, 2.5)
    assert row.updated_at == run_dir.events.stat().st_mtime


def test_after_lost_work_the_step_is_the_one_it_is_at_now(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a-run")
    run_dir.path.mkdir()
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 3, 2)]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    assert read_state(run_dir).step == 2


def test_lines_are_read_backwards_whole_however_long_they_are(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [
        {"step": n, "text": "x" * (n * 997)} for n in range(60)
    ]  # beyond one block each, at last
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "torn {")
    assert list(read_lines_backwards(path)) == lines[::-1]
    assert list(read_lines_backwards(tmp_path / "none")) == []


def test_nodes_that_the_newest_attempt_goes_on_without_are_named(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a-run")
    left = {"kind": "node_left_out", "node": "b", "node_rank": 1, "cause": "3 losses"}
    lines = [STARTED, {**left, "node": "a"}, STARTED, left, {**left, "node_rank": "odd"}]
    run_dir.path.mkdir()
    run_dir.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_state(run_dir).left_out == (ExcludedNode(node="b", node_rank=1, cause="3 losses"),)
