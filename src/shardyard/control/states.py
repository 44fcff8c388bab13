"""The state of many jobs at once, as far as their launchers answer in time."""

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from shardyard.control.job import job_of
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import CapacityError, ShardyardError
from shardyard.launchers.base import Answer, AsksMany, Launcher, Submission, answer
from shardyard.launchers.ledger import Entry
from shardyard.log import warn
from shardyard.rundir.layout import RunDir

_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class _Question:
    """About one job, or about all of a scheduler that tells of many in one call."""

    launcher: Launcher
    whose: str
    """Who is to answer, in words."""
    jobs: Sequence[Submission]


@dataclass(frozen=True, kw_only=True)
class _Told:
    run_id: str
    whose: str
    answer: Answer

    @property
    def word(self) -> str:
        said = self.answer
        return "no answer" if isinstance(said, ShardyardError) else said.state.value


_Waiting = queue.SimpleQueue[_Question | None]
_Answers = queue.SimpleQueue[_Told]


def ask_all(
    jobs: Sequence[tuple[RunDir, Entry]], launchers: Launchers | None, *, within_s: float
) -> dict[str, str]:
    """Run id -> state of its job, in a word; a job that was not told of in time is left out.

    Why there is no answer is said once for each scheduler.
    """
    waiting, told = _Waiting(), _Answers()
    asked = [job_of(run_dir, entry) for run_dir, entry in jobs]
    for question in sorted(_questions(asked, launchers, told), key=lambda one: -len(one.jobs)):
        waiting.put(question)
    ends_at = time.monotonic() + within_s

    def ask() -> None:
        while (question := waiting.get()) is not None and time.monotonic() < ends_at:
            _ask(question, waiting, told)

    # daemons, not a pool: one that hangs in a call must not keep the list from being shown
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(min(_THREADS, len(jobs)))]
    for thread in threads:
        thread.start()
    found: dict[str, _Told] = {}
    while len(found) < len(jobs) and (left_s := ends_at - time.monotonic()) > 0:
        try:
            one = told.get(timeout=left_s)
        except queue.Empty:
            break
        found[one.run_id] = one
    for _ in threads:
        waiting.put(None)
    _warn_of(found.values())
    return {run_id: one.word for run_id, one in found.items()}


def _questions(
    jobs: Sequence[Submission], launchers: Launchers | None, told: _Answers
) -> list[_Question]:
    """One for each scheduler that tells of many jobs, else one a job, in the order of the jobs.

    Args:
        told: Where that there is no such launcher is told, or that it cannot be used.
    """
    questions: list[_Question] = []
    for name in dict.fromkeys(job.launcher for job in jobs):
        of_one = [job for job in jobs if job.launcher == name]
        try:
            launcher = launcher_named(name, launchers)
        except ShardyardError as error:
            for job in of_one:
                told.put(_Told(run_id=job.run_id, whose=name, answer=error))
            continue
        if not isinstance(launcher, AsksMany):
            questions += [_Question(launcher=launcher, whose=name, jobs=[job]) for job in of_one]
            continue
        groups: dict[str, list[Submission]] = {}
        for job in of_one:
            groups.setdefault(launcher.answered_by(job), []).append(job)
        questions += [
            _Question(launcher=launcher, whose=f"{name}, {which}" if which else name, jobs=group)
            for which, group in groups.items()
        ]
    return questions


def _ask(question: _Question, waiting: _Waiting, told: _Answers) -> None:
    """Tell what is answered; what cannot be asked at once waits to be asked one by one."""
    launcher, whose, jobs = question.launcher, question.whose, question.jobs
    answers: Sequence[Answer]
    try:
        if isinstance(launcher, AsksMany) and len(jobs) > 1:
            answers = launcher.statuses(jobs)
        else:
            answers = [answer(partial(launcher.status, job)) for job in jobs]
    except CapacityError as error:
        answers = [error] * len(jobs)
    except ShardyardError:
        for job in jobs:
            waiting.put(_Question(launcher=launcher, whose=whose, jobs=[job]))
        return
    except Exception as error:  # noqa: BLE001 - in a thread, where it would be lost
        words = f"launcher {launcher.name} raised {type(error).__name__}: {error}. This is a bug"
        answers = [ShardyardError(f"{words} of the launcher: please report it.")] * len(jobs)
    for job, said in zip(jobs, answers, strict=True):
        told.put(_Told(run_id=job.run_id, whose=whose, answer=said))


def _warn_of(told: Iterable[_Told]) -> None:
    errors: dict[str, list[ShardyardError]] = {}
    for one in told:
        if isinstance(one.answer, ShardyardError):
            errors.setdefault(one.whose, []).append(one.answer)
    for whose, of_one in errors.items():
        jobs = "1 job" if len(of_one) == 1 else f"{len(of_one)} jobs"
        warn(f"{whose}: no answer for {jobs}: {of_one[0]}")
