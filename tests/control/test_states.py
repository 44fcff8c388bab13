"""Many jobs at once: one question to each scheduler that tells of many, else one a job."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from shardyard.control.runs import ask_all
from shardyard.errors import AccessError, CapacityError, ShardyardError
from shardyard.launchers.base import Answer, AsksMany, JobState, JobStatus, Launcher
from shardyard.launchers.ledger import LedgerEntry, Submission
from shardyard.rundir.layout import RunDir

RUNS = JobStatus(state=JobState.RUNNING, reason="on 1 node")


@dataclass
class One:
    """A launcher that tells of one job at a time; it is asked for nothing else here."""

    alone: list[str] = field(default_factory=list)
    """Runs whose job was asked about alone."""

    def status(self, job: Submission) -> JobStatus:
        self.alone.append(job.run_id)
        if job.run_id.endswith("7"):
            raise ShardyardError(f"{job.run_id} is odd.")
        return RUNS


@dataclass
class Many(One):
    """Tells of all jobs of a zone in one call."""

    calls: list[list[str]] = field(default_factory=list)
    first: Callable[[], object] = lambda: None
    """What comes before the answer."""

    def scheduler_of(self, job: Submission) -> str:
        return job.details["zone"]

    def statuses(self, jobs: Sequence[Submission]) -> list[Answer]:
        self.calls.append([job.run_id for job in jobs])
        self.first()
        odd = ShardyardError("it is odd.")
        return [odd if job.run_id.endswith("7") else RUNS for job in jobs]


def ask(
    asked: Sequence[tuple[RunDir, LedgerEntry]], *, within_s: float = 30, **launchers: One
) -> dict[str, str]:
    return ask_all(asked, cast(Mapping[str, Launcher], launchers), within_s=within_s)


def jobs(*zones: str, each: int, launcher: str = "fake") -> list[tuple[RunDir, LedgerEntry]]:
    return [
        (RunDir(Path(f"/runs/{launcher}-{zone}-{number}")),
         LedgerEntry(kind="job", name="sy", launcher=launcher, id="8", details={"zone": zone}))
        for zone in zones
        for number in range(each)
    ]  # fmt: skip


def test_each_scheduler_is_asked_once_and_each_job_of_others() -> None:
    many, one = Many(), One()
    assert isinstance(many, AsksMany) and not isinstance(one, AsksMany)
    asked = [*jobs("a", "b", each=5), *jobs("a", each=3, launcher="other")]
    told = ask(asked, fake=many, other=one)
    assert told == {run_dir.run_id: "running" for run_dir, _ in asked}
    assert [len(call) for call in sorted(many.calls)] == [5, 5] and many.alone == []
    assert sorted(one.alone) == ["other-a-0", "other-a-1", "other-a-2"]


def test_one_job_of_a_scheduler_is_asked_as_status_asks() -> None:
    many = Many()
    assert ask(jobs("a", each=1), fake=many) == {"fake-a-0": "running"}
    assert (many.calls, many.alone) == ([], ["fake-a-0"])


def test_the_error_of_one_job_is_said_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="shardyard")
    asked = [*jobs("a", each=9), *jobs("a", each=9, launcher="other")]
    told = ask(asked, fake=Many(), other=One())
    assert [run for run, word in told.items() if word != "running"] == ["fake-a-7", "other-a-7"]
    assert told["fake-a-7"] == told["other-a-7"] == "no answer"
    assert sorted(caplog.messages) == [
        "fake, a: no answer for 1 job: it is odd.",
        "other: no answer for 1 job: other-a-7 is odd.",
    ]


def _raises(error: Exception) -> Callable[[], object]:
    def first() -> None:
        raise error

    return first


def test_a_scheduler_that_is_away_is_asked_once_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = Many(first=_raises(CapacityError("the controller is down.")))
    told = ask(jobs("a", each=30), fake=many)
    assert set(told.values()) == {"no answer"} and len(told) == 30
    assert (len(many.calls), many.alone) == (1, [])
    assert caplog.messages == ["fake, a: no answer for 30 jobs: the controller is down."]


def test_what_cannot_be_asked_at_once_is_asked_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    many = Many(first=_raises(AccessError("you may not list.")))
    told = ask(jobs("a", each=30), fake=many)
    assert len(many.calls) == 1 and len(many.alone) == len(told) == 30
    assert list(told.values()).count("no answer") == 3
    assert len(caplog.messages) == 1 and "no answer for 3 jobs" in caplog.text


def test_a_launcher_that_is_not_installed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = [*jobs("a", each=3), *jobs("a", each=3, launcher="lost")]
    told = ask(asked, fake=Many())
    assert sorted(told.values()) == ["no answer"] * 3 + ["running"] * 3
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("lost: no answer for 3 jobs: unknown launcher 'lost'")


def test_a_scheduler_that_hangs_keeps_no_other_from_being_told() -> None:
    never = threading.Event()
    many = Many(first=lambda: never.wait(30))
    asked = [*jobs("a", each=30), *jobs("a", each=30, launcher="other")]
    began_s = time.monotonic()
    told = ask(asked, fake=many, other=One(), within_s=1)
    assert time.monotonic() - began_s < 10
    assert sorted(told) == sorted(run_dir.run_id for run_dir, _ in asked[30:])
    never.set()


def test_no_thread_stays_once_all_is_told() -> None:
    before = threading.active_count()
    ask(jobs("a", each=30), fake=One(), within_s=600)
    end_s = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < end_s
        time.sleep(0.01)
