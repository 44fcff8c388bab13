"""How long a drill waits for a run."""

import json
from pathlib import Path

import pytest

from shardyard.drill.case import Commands, DrillWorkspace
from shardyard.rundir.layout import RunDir
from tests.drill.test_drill import ONE_NODE


@pytest.mark.parametrize(
    ("kinds", "is_starting"),
    [
        (("run_started",), True),
        (("run_started", "network"), True),
        (("run_started", "attempt_started", "rendezvous"), False),
        (("run_started", "attempt_started", "checkpoint_durable", "attempt_ended"), True),
        (("attempt_started", "attempt_ended", "network", "attempt_started"), False),
    ],
)
def test_a_start_may_take_longer_than_a_step(
    tmp_path: Path, kinds: tuple[str, ...], is_starting: bool
) -> None:
    run = RunDir(tmp_path)
    run.events.write_text("".join(json.dumps({"t": 1.0, "kind": kind}) + "\n" for kind in kinds))
    place = DrillWorkspace(folder=tmp_path, patience_s=1.0)
    commands = Commands(workspace=place, drilled=ONE_NODE, run=run, scratch=tmp_path, faults="")
    assert commands._is_starting() is is_starting
