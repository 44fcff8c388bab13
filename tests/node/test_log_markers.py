"""Node 0's stdout: what the line files gain, and nothing of what they held before."""

from pathlib import Path

import pytest

from shardyard.launchers.log_markers import MarkedLine, parse
from shardyard.node.log_markers import marked_on_stdout, take_nonce
from shardyard.rundir.jsonl import LineWriter
from shardyard.rundir.layout import RunDir


def test_the_nonce_is_taken_out_of_what_the_training_inherits() -> None:
    environ = {"SHARDYARD_MARK": "abc", "PATH": "/bin"}
    assert take_nonce(environ) == "abc"
    assert environ == {"PATH": "/bin"}
    assert take_nonce(environ) == ""  # a node of a job of before there was one


def test_new_lines_are_printed_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "r")
    metrics = LineWriter(run.metrics)
    metrics.append({"step": 1})
    with marked_on_stdout(run, nonce="abc"):
        metrics.append({"step": 2})
        events = LineWriter(run.events)  # is not there at first
        events.append({"kind": "first_step"})
    metrics.close()
    events.close()
    lines = [parse(line, nonce="abc") for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        MarkedLine("event", {"kind": "first_step"}),
        MarkedLine("metrics", {"step": 2}),
    ]
