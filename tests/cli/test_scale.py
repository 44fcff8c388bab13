"""`shardyard scale`: a job that can be resized is; any other is drained and submitted again."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.control.job import find_launched
from shardyard.control.scale import drain
from shardyard.errors import CapacityError, ShardyardError
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.lease import Lease
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    capsys.readouterr()
    return launcher


@pytest.fixture
def fixed(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    """Its jobs keep their two nodes; the one that runs drains when it is asked."""
    launcher = fake_that_can(resizes=())
    assert launch(tmp_path, launcher, "--yes") == 0
    launcher.statuses = [status(JobState.RUNNING), status(JobState.DRAINED)]
    capsys.readouterr()
    return launcher


def scale(launcher: FakeLauncher, folder: Path, *arguments: str) -> int:
    return shardyard(launcher, "scale", "first", *arguments, *runs_dir(folder))


def num_jobs(folder: Path) -> int:
    return len(Ledger(folder / "runs" / "first" / "ledger.jsonl").jobs())


def test_an_elastic_run_is_given_another_number_of_nodes(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert scale(fake, tmp_path, "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["asked_nodes"] == 3
    assert scale(fake, tmp_path, "4", "--dry-run") == 0
    assert "would be given 4 nodes" in capsys.readouterr().out
    assert (fake.scaled, fake.cancelled) == ([3], 0)


def test_a_resized_job_is_followed_if_asked(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(JobState.RUNNING), status(JobState.SUCCEEDED, exit_code=0)]
    assert scale(fake, tmp_path, "3", "--follow") == 0
    assert "job 8 succeeded" in capsys.readouterr().err


def test_a_number_that_the_run_was_not_launched_for_is_refused(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert scale(fake, tmp_path, "5") == 2
    err = capsys.readouterr().err
    assert "NODES=5 but the run was launched for 1 to 4 nodes" in err
    assert "elastic.max_nodes=5" in err
    assert fake.scaled == []


def test_a_job_that_keeps_its_nodes_is_drained_and_the_run_submitted_again(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    assert scale(fixed, tmp_path, "3", "--yes") == 0
    out, err = capsys.readouterr()
    assert "job: 8 (sy-first) on fake" in out
    told = [
        "job 8 on fake keeps its 2 nodes: it will be drained, and the run submitted again",
        "launch: run first as sy-first on fake: 3 nodes",
        "job 8 on fake was asked to save and end; waiting up to 5 min",
        "job 8 on fake is over (drained): submitting the run with 3 nodes",
    ]
    assert [err.index(words) for words in told] == sorted(err.index(words) for words in told)
    first, again = fixed.submitted
    assert (again.is_resume, again.submission, again.nodes) == (True, 2, 3)
    assert again.run_dir == first.run_dir
    assert (fixed.cancelled, num_jobs(tmp_path)) == (1, 2)
    fixed.statuses = [status(JobState.RUNNING), status(JobState.DRAINED)]
    assert scale(fixed, tmp_path, "1", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == "8"
    assert fixed.submitted[-1].nodes == 1


def test_a_dry_run_prints_the_next_job_and_drains_nothing(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    assert scale(fixed, tmp_path, "3", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert out.startswith("# 3 x 2\n")
    assert "it would be drained" in err
    assert (fixed.cancelled, num_jobs(tmp_path)) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("3",), "this is not a terminal"),
        (("2", "--yes"), "NODES=2, and job 8 on fake was submitted with that many"),
        (("5", "--yes"), "elastic.max_nodes"),
        (("3", "--yes", "--max-usd", "1"), "the price is not known"),
    ],
)
def test_what_is_refused_is_refused_before_the_job_is_touched(
    tmp_path: Path,
    fixed: FakeLauncher,
    capsys: Captured,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert scale(fixed, tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err
    assert (fixed.cancelled, num_jobs(tmp_path)) == (0, 1)


def test_a_waiting_job_is_replaced_too(tmp_path: Path, fixed: FakeLauncher) -> None:
    fixed.statuses = [status(JobState.WAITING), status(JobState.CANCELLED)]
    assert scale(fixed, tmp_path, "3", "--yes") == 0
    assert num_jobs(tmp_path) == 2


def test_a_run_that_finishes_while_it_drains_is_not_submitted_again(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    fixed.statuses = [status(JobState.RUNNING), status(JobState.SUCCEEDED)]
    assert scale(fixed, tmp_path, "3", "--yes") == 0
    assert "came to the end of the run before it drained" in capsys.readouterr().out
    assert num_jobs(tmp_path) == 1


def test_a_job_that_fails_while_it_drains_is_not_submitted_again(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    fixed.statuses = [status(JobState.RUNNING), status(JobState.FAILED, "the disk is full")]
    assert scale(fixed, tmp_path, "3", "--yes") == 1
    err = capsys.readouterr().err
    assert "job 8 on fake failed while it drained: the disk is full" in err
    assert "note: job 8 on fake was asked to end, and no other was submitted" in err
    assert "`shardyard resume first cluster.nodes=3` continues" in err.replace(
        str(tmp_path / "runs") + "/", ""
    )
    assert num_jobs(tmp_path) == 1


def test_a_refused_submission_after_the_drain_says_how_the_run_stands(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    fixed.refuses = CapacityError("no room. Try again.")
    assert scale(fixed, tmp_path, "3", "--yes") == 3
    err = capsys.readouterr().err
    assert "no other was submitted" in err and "no room" in err


def test_a_run_that_this_machine_still_trains_is_not_submitted_again(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    lease = Lease(tmp_path / "runs" / "first" / "lease.json")
    try:
        assert scale(fixed, tmp_path, "3", "--yes") == 2
    finally:
        lease.close()
    assert "no other was submitted" in capsys.readouterr().err
    assert num_jobs(tmp_path) == 1


@dataclass
class Clock:
    """Time that passes only by sleeping."""

    now_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_drain_that_does_not_end_is_given_up_with_what_to_do(
    tmp_path: Path, fixed: FakeLauncher
) -> None:
    fixed.statuses = [status(JobState.RUNNING, "step 7")]
    clock = Clock()
    launched = find_launched("first", tmp_path / "runs", {"fake": fixed})
    with pytest.raises(
        ShardyardError,
        match=r"asked to save and end 5 min.* ago .*still running: step 7\. Two jobs at once",
    ) as raised:
        drain(launched, sleep=clock.sleep)
    assert "shardyard watch" in str(raised.value) and "shardyard teardown" in str(raised.value)
    assert 300 <= clock.now_s < 320  # elastic.drain_timeout_s=120 and 180 s


def test_ctrl_c_while_it_drains_says_how_the_run_stands(
    tmp_path: Path, fixed: FakeLauncher, capsys: Captured
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fixed.at_cancel = interrupt
    assert scale(fixed, tmp_path, "3", "--yes") == 130
    assert "no other was submitted" in capsys.readouterr().err


def test_a_job_that_is_over_is_resumed_instead(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(JobState.DRAINED)]
    assert scale(fake, tmp_path, "3") == 2
    err = capsys.readouterr().err
    assert "is over (drained)" in err and "cluster.nodes=3` continues with 3 nodes" in err


def test_no_nodes_are_refused(tmp_path: Path, fake: FakeLauncher) -> None:
    assert scale(fake, tmp_path, "0") == 2
