"""`shardyard scale`: only what is elastic, only while it lives."""

import json
from pathlib import Path

import pytest

from shardyard.launch.base import JobState
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    capsys.readouterr()
    return launcher


def test_an_elastic_run_is_given_another_number_of_nodes(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "scale", "first", "3", *runs_dir(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["asked_nodes"] == 3
    assert shardyard(fake, "scale", "first", "4", *runs_dir(tmp_path), "--dry-run") == 0
    assert "would be given 4 nodes" in capsys.readouterr().out
    assert fake.scaled == [3]


def test_a_number_that_the_run_was_not_launched_for_is_refused(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "scale", "first", "5", *runs_dir(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "NODES=5 but the run was launched for 1 to 4 nodes" in err
    assert "elastic.max_nodes=5" in err
    assert fake.scaled == []


def test_a_launcher_with_fixed_jobs_says_how_it_is_done_there(
    tmp_path: Path, capsys: Captured
) -> None:
    fixed = fake_that_can(scales=False)
    assert launch(tmp_path, fixed, "--yes") == 0
    assert shardyard(fixed, "scale", "first", "3", *runs_dir(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "fake cannot change the number of nodes of a running job" in err
    assert "shardyard cancel" in err and "cluster.nodes=3" in err


def test_a_job_that_is_over_is_resumed_instead(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(JobState.DRAINED)]
    assert shardyard(fake, "scale", "first", "3", *runs_dir(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "is over (drained)" in err and "cluster.nodes=3` goes on with 3 nodes" in err


def test_no_nodes_are_refused(tmp_path: Path, fake: FakeLauncher) -> None:
    assert shardyard(fake, "scale", "first", "0", *runs_dir(tmp_path)) == 2
