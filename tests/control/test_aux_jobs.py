"""Side jobs from the command line: submitted once, followed, answered, found again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli.confirm import side_terms
from shardyard.config.load import load_recipe
from shardyard.control.aux_jobs import (
    SideJobStoppedError,
    SideTerms,
    follow_side_job,
    run_side_job,
    side_request,
    start_side_job,
)
from shardyard.control.job import latest_job_recipe
from shardyard.errors import AccessError, CapacityError, ShardyardError
from shardyard.launchers.base import JobState, JobStatus, LaunchRequest, LogLine, SideJob
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.contracts import read_answer
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]
SIDE = SideJob(kind="export", arguments={"step": 7})
YES = side_terms(is_yes=True)
RESULT = {"files": 3}

pytestmark = pytest.mark.usefixtures("talk_on_stderr")


class Site:
    """A run that was launched, whose side jobs are asked for."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeLauncher()
        assert launch(folder, self.fake, "--yes") == 0
        self.fake.submitted.clear()
        self.folder = folder
        self.run_dir = RunDir(folder / "runs" / "first")
        self.ledger = Ledger(self.run_dir.ledger)

    def request(self) -> LaunchRequest:
        recipe = load_recipe([latest_job_recipe(self.run_dir)])
        return side_request(self.run_dir, self.fake, SIDE, recipe=recipe)

    def ask(self, terms: SideTerms = YES, **content: Any) -> dict[str, Any] | None:
        """Ask; what it answers is given, unless there are lines of an earlier one."""
        request = self.request()
        if not self.fake.lines:
            self.answers(request, **(content or {"result": RESULT, "exit_code": 0}))
        return run_side_job(self.run_dir, self.fake, request, terms)

    def answers(self, request: LaunchRequest, **content: Any) -> None:
        """What the side job of a request will have printed, and that it is over then."""
        self.fake.submitted.append(request)
        assert request.side is not None
        line = self.fake.marked("answer", {"side": request.side.label, **content})
        self.fake.lines = [
            LogLine(source="node 0", text="it works"),
            LogLine(source="node 0", text=line),
        ]
        is_good = content.get("exit_code") == 0
        running = status(JobState.RUNNING)
        self.fake.statuses = [running, status(JobState.SUCCEEDED if is_good else JobState.FAILED)]

    def handed_on(self) -> dict[str, Any] | None:
        found = read_answer(self.run_dir, SIDE.label)
        return None if found is None else found.result

    def submissions(self) -> int:
        return len(self.ledger.side_jobs())


@pytest.fixture
def site(tmp_path: Path, capsys: Captured) -> Site:
    made = Site(tmp_path)
    capsys.readouterr()
    return made


def test_it_is_submitted_followed_and_answered(site: Site, capsys: Captured) -> None:
    assert site.ask() == RESULT
    out, err = capsys.readouterr()
    assert out == "", "stdout is the answer of the verb that asked"
    assert "export: sy-first on fake: one node without accelerators, 4 cores, 12 GiB" in err
    assert "it works" in err and "@shardyard" not in err
    assert [job.details["side"] for job in site.ledger.side_jobs()] == [SIDE.label]
    assert len(site.ledger.jobs()) == 1, "the training"
    assert site.handed_on() == RESULT


def test_a_dry_run_prints_what_would_be_sent_and_creates_nothing(
    site: Site, capsys: Captured
) -> None:
    before = sorted(site.folder.rglob("*")), site.ledger.path.read_bytes()
    assert site.ask(side_terms(is_yes=False, dry_run=True)) is None
    out = capsys.readouterr().out
    assert out == site.fake.render(site.request()).text
    assert site.ask(side_terms(is_yes=False, dry_run=True, as_json=True)) is None
    assert json.loads(capsys.readouterr().out)["text"] == out
    assert (sorted(site.folder.rglob("*")), site.ledger.path.read_bytes()) == before


def test_nothing_is_submitted_that_nobody_agreed_to(site: Site) -> None:
    with pytest.raises(ShardyardError, match="this is not a terminal"):
        site.ask(side_terms(is_yes=False))
    assert site.submissions() == 0


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(1, ShardyardError), (4, AccessError), (99, ShardyardError)]
)
def test_its_error_is_the_verbs_error(
    site: Site, exit_code: int, kind: type[ShardyardError]
) -> None:
    with pytest.raises(kind, match=r"^no room\. Make some\.$") as caught:
        site.ask(error="no room. Make some.", exit_code=exit_code)
    assert type(caught.value) is kind
    assert site.handed_on() is None


def test_one_that_ended_without_an_answer_is_named_with_what_to_do(site: Site) -> None:
    site.fake.lines = [LogLine(source="node 0", text="killed")]
    site.fake.statuses = [status(JobState.FAILED, "out of memory", 137)]
    with pytest.raises(ShardyardError) as caught:
        site.ask()
    words = str(caught.value)
    assert (
        "side job 8 (sy-first) on fake is over (failed: out of memory) and gave no answer" in words
    )
    assert "--side` shows it again. The same command starts another." in words


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.DRAINED])
def test_one_that_was_asked_to_end_ends_the_verb_with_143(site: Site, state: JobState) -> None:
    site.fake.lines = [LogLine(source="node 0", text="bye")]
    site.fake.statuses = [status(state)]
    with pytest.raises(SideJobStoppedError, match="ended before it was done") as caught:
        site.ask()
    assert caught.value.exit_code == 143


def killed(site: Site) -> None:
    """The command line dies as soon as the side job is submitted."""
    request = site.request()
    site.answers(request, result=RESULT, exit_code=0)
    statuses = site.fake.statuses

    class Dead(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Dead

    site.fake.status = die  # type: ignore[method-assign, assignment]
    with pytest.raises(Dead):
        run_side_job(site.run_dir, site.fake, request, YES)
    del site.fake.status
    site.fake.statuses = statuses


def test_a_command_that_was_killed_finds_its_side_job_alive_and_follows_it(
    site: Site, capsys: Captured
) -> None:
    killed(site)
    site.fake.statuses = [status(JobState.RUNNING)] * 3 + [status(JobState.SUCCEEDED)]
    assert site.ask(side_terms(is_yes=False)) == RESULT
    assert site.submissions() == 1
    assert "lives already: it is followed" in capsys.readouterr().err


def test_a_command_that_was_killed_takes_the_answer_of_one_that_is_done_since(site: Site) -> None:
    killed(site)
    site.fake.statuses = [status(JobState.SUCCEEDED)]
    assert site.ask(side_terms(is_yes=False)) == RESULT
    assert site.submissions() == 1
    assert site.handed_on() == RESULT


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.GONE, JobState.CANCELLED])
def test_one_that_failed_or_is_gone_is_submitted_again(
    site: Site, capsys: Captured, state: JobState
) -> None:
    killed(site)
    site.fake.lines = []
    over = status(state, "so it is")
    site.fake.statuses = [over, over, status(JobState.RUNNING), status(JobState.SUCCEEDED)]
    request = site.request()
    assert request.submission == 2
    statuses = site.fake.statuses
    site.answers(request, result=RESULT, exit_code=0)
    site.fake.statuses = statuses
    assert run_side_job(site.run_dir, site.fake, request, YES) == RESULT
    assert site.submissions() == 2
    assert f"is over ({state.value}: so it is): another is submitted" in capsys.readouterr().err


def test_an_answer_that_was_handed_on_is_asked_anew_unless_an_old_one_will_do(site: Site) -> None:
    assert site.ask() == RESULT
    site.fake.statuses = [status(JobState.SUCCEEDED)]
    old = replace(side_terms(is_yes=False), accepts_old_answer=True)
    assert site.ask(old) == RESULT
    assert site.submissions() == 1
    site.fake.lines = []
    assert site.ask() == RESULT
    assert site.submissions() == 2


def test_what_a_killed_submission_left_is_removed_before_another_is_made(site: Site) -> None:
    entry = site.ledger.intend("fake job", "old", launcher="fake", side=SIDE.label)
    site.ledger.confirm(entry, "9")
    removed: list[str] = []
    remove = site.fake.remove

    def noted(job: Any, ledger: Ledger) -> Any:
        removed.append(job.name)
        return remove(job, ledger)

    site.fake.remove = noted  # type: ignore[method-assign]
    assert site.ask() == RESULT
    assert removed == ["old"]


def test_one_that_no_node_can_hold_ends_its_wait_with_the_schedulers_reason(
    site: Site, capsys: Captured
) -> None:
    reason = "0/2 nodes are available: 2 Insufficient memory."
    site.answers(site.request(), result=RESULT, exit_code=0)
    site.fake.statuses = [
        JobStatus(state=JobState.WAITING, reason=reason, is_unplaced=True)
    ] * 200  # fmt: skip
    job = start_side_job(site.run_dir, site.fake, site.request(), YES)
    assert job is not None
    slept: list[float] = []
    with pytest.raises(CapacityError) as raised:
        follow_side_job(job, sleep=slept.append)
    assert 300 <= sum(slept) < 320
    assert f"found no node for 300 s: {reason}" in str(raised.value)
    assert "launch.side.memory_gib=8" in str(raised.value)
    assert f"waiting: {reason}" in capsys.readouterr().err


def test_one_that_waits_for_its_image_is_not_given_up(site: Site) -> None:
    request = site.request()
    site.answers(request, result=RESULT, exit_code=0)
    slow = JobStatus(state=JobState.WAITING, reason="its containers start")
    site.fake.statuses = [slow] * 100 + site.fake.statuses
    job = start_side_job(site.run_dir, site.fake, request, YES)
    assert job is not None
    assert follow_side_job(job, sleep=lambda _: None) == RESULT


def test_ctrl_c_leaves_it_running_and_says_how_to_go_on(site: Site, capsys: Captured) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    site.fake.at_end_of_logs = interrupt
    with pytest.raises(KeyboardInterrupt):
        site.ask()
    err = capsys.readouterr().err
    assert "the side job continues. The same command follows it again" in err
    assert "--side` ends it" in err
    assert site.fake.cancelled == 0


# -- the verbs that steer -----------------------------------------------------------------------


def verb(site: Site, *words: str) -> int:
    return shardyard(site.fake, *words, *runs_dir(site.folder))


def test_status_logs_and_cancel_of_a_run_mean_its_training_unless_the_side_job_is_named(
    site: Site, capsys: Captured
) -> None:
    killed(site)
    site.fake.statuses = [status(JobState.RUNNING)]
    capsys.readouterr()
    assert verb(site, "status", "first", "--json") == 0
    assert "side" not in json.loads(capsys.readouterr().out)
    assert verb(site, "status", "first", "--side", "--json") == 0
    assert json.loads(capsys.readouterr().out)["side"] == SIDE.label
    assert verb(site, "status", "first", "--side") == 0
    assert "side job" in capsys.readouterr().out
    assert verb(site, "logs", "first", "--side") == 0
    assert capsys.readouterr().out == "it works\n"
    assert verb(site, "cancel", "first", "--side") == 0
    out = capsys.readouterr().out
    assert "side job 8 on fake was asked to end." in out and "resume" not in out


def test_a_run_without_side_jobs_says_so(site: Site, capsys: Captured) -> None:
    assert verb(site, "status", "first", "--side") == 2
    assert "run first has no side job" in capsys.readouterr().err


def test_teardown_waits_for_a_living_side_job_and_removes_it_with_the_rest(
    site: Site, capsys: Captured
) -> None:
    killed(site)
    site.fake.statuses = [status(JobState.SUCCEEDED), status(JobState.RUNNING)]
    assert verb(site, "teardown", "first", "--yes") == 2
    assert "side job 8 of run first is running" in capsys.readouterr().err
    site.fake.statuses = [status(JobState.SUCCEEDED)]
    assert verb(site, "teardown", "first", "--yes") == 0
    assert "all objects of run first are removed" in capsys.readouterr().out


@pytest.fixture
def alone(site: Site) -> Site:
    """The folder has a side job and no training."""
    site.ledger.path.unlink()
    shutil.rmtree(site.run_dir.path / "submissions")
    killed(site)
    site.fake.statuses = [status(JobState.RUNNING)]
    return site


def test_a_folder_that_has_only_a_side_job_is_about_that_one(alone: Site, capsys: Captured) -> None:
    assert verb(alone, "status", "first", "--json") == 0
    assert json.loads(capsys.readouterr().out)["side"] == SIDE.label
    assert shardyard(alone.fake, "runs", *runs_dir(alone.folder)) == 0
    assert "fake: export running" in capsys.readouterr().out
    assert verb(alone, "cancel", "first") == 0
    assert "side job 8 on fake was asked to end." in capsys.readouterr().out


@pytest.mark.parametrize("words", [("resume", "first", "--yes"), ("scale", "first", "3", "--yes")])
def test_a_side_job_is_no_training_to_go_on_with(
    alone: Site, capsys: Captured, words: tuple[str, ...]
) -> None:
    assert shardyard(alone.fake, *words, *runs_dir(alone.folder)) == 2
    assert "run first has no training" in capsys.readouterr().err
