"""A tear-down asked for from Python: it asks through what it is handed, and returns what it did."""

from pathlib import Path

import pytest

from shardyard.control.teardown import preview_teardown, tear_down
from shardyard.launchers.base import JobState
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, status

OBJECTS = ["fake job sy-first", "fake service sy-first"]


@pytest.fixture
def fake(tmp_path: Path) -> FakeLauncher:
    launcher = FakeLauncher(statuses=[status(JobState.SUCCEEDED)])
    assert launch(tmp_path, launcher, "--yes") == 0
    return launcher


def test_it_asks_once_and_returns_what_it_removed(tmp_path: Path, fake: FakeLauncher) -> None:
    run_dir, launchers = RunDir(tmp_path / "runs" / "first"), {"fake": fake}
    asked: list[str] = []
    found = tear_down(run_dir, agree=asked.append, launchers=launchers)
    assert asked == ["remove it?"]
    assert (found.removed, found.left, fake.created) == (OBJECTS, [], set())
    assert list(found.to_json()) == ["removed", "foreign", "left", "over", "untouched"]
    assert tear_down(run_dir, agree=asked.append, launchers=launchers).removed == []
    assert asked == ["remove it?"], "there is nothing to ask about"


def test_a_no_and_a_look_change_nothing(tmp_path: Path, fake: FakeLauncher) -> None:
    run_dir, launchers = RunDir(tmp_path / "runs" / "first"), {"fake": fake}
    there = set(fake.created)

    def refuse(_question: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tear_down(run_dir, agree=refuse, launchers=launchers)
    found = preview_teardown(run_dir, launchers=launchers)
    assert sorted(found.left + found.over) == OBJECTS
    assert fake.created == there != set()
