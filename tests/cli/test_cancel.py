"""`shardyard cancel`: asks once, and is safe to repeat."""

import json
from pathlib import Path

import pytest

from shardyard.launchers.base import JobState
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    capsys.readouterr()
    return launcher


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.RUNNING])
def test_a_job_is_asked_to_save_and_end(
    state: JobState, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(state)]
    assert shardyard(fake, "cancel", "first", *runs_dir(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "job 8 on fake was asked to save and end" in out
    assert "shardyard watch" in out and "shardyard resume" in out
    assert fake.cancelled == 1


@pytest.mark.parametrize("state", [state for state in JobState if state.is_over])
def test_a_second_cancel_says_that_it_is_over(
    state: JobState, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(state)]
    assert shardyard(fake, "cancel", "first", *runs_dir(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["message"].endswith(f"over already: {state}")
    assert fake.cancelled == 0


def test_a_dry_run_cancels_nothing(tmp_path: Path, fake: FakeLauncher, capsys: Captured) -> None:
    assert shardyard(fake, "cancel", "first", *runs_dir(tmp_path), "--dry-run") == 0
    assert "is running and would be asked" in capsys.readouterr().out
    assert fake.cancelled == 0
