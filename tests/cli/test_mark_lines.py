"""Node 0's stdout: what the line files gain, and nothing of what they held before."""

from pathlib import Path

import pytest

from shardyard.cli.mark_lines import marked_on_stdout
from shardyard.launch.marked import Marked, parse
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import LineWriter


def test_new_lines_are_printed_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "r")
    metrics = LineWriter(run.metrics)
    metrics.append({"step": 1})
    with marked_on_stdout(run):
        metrics.append({"step": 2})
        events = LineWriter(run.events)  # is not there at first
        events.append({"kind": "first_step"})
    metrics.close()
    events.close()
    lines = [parse(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [Marked("event", {"kind": "first_step"}), Marked("metrics", {"step": 2})]
