"""Runs in a folder and their status, with the jobs of launched ones."""

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardyard.config.load import load_recipe
from shardyard.control.costs import RunAccount, account_of
from shardyard.control.job import job_of, warn_unfinished
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import CapacityError, RequestError, ShardyardError, StorageError
from shardyard.launchers.base import Answer, AsksMany, FindsJobs, Launcher, SchedulerJob, answer
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger, LedgerEntry, Submission
from shardyard.log import warn
from shardyard.rundir.jsonl import json_value
from shardyard.rundir.layout import RunDir, is_run
from shardyard.rundir.state import RunState, read_state_in_list

# Jobs of ours that a scheduler has and that no run of a folder knows: they may cost money.
#
# A folder that was moved, renamed or deleted takes its ledger along. What is left are the marks
# that each submission gives its job: a comment on Slurm, labels on Kubernetes, tags on AWS Batch.


def strays(launcher: Launcher, overrides: Sequence[str], runs_dir: Path) -> list[SchedulerJob]:
    """Return jobs that are not over and are in no ledger of a folder of runs.

    Args:
        overrides: ``launch...=value``: the region, context or namespace to ask.

    Raises:
        RequestError: The launcher gives its jobs no mark.
        StorageError: A ledger of the folder cannot be read, so it is not known what it names.
    """
    if not isinstance(launcher, FindsJobs):
        raise RequestError(
            f"jobs of {launcher.name} carry no mark by which they could be found without their "
            "run's folder. Ask one of slurm, kubernetes, aws-batch, ssh."
        )
    known = _ledger_ids(runs_dir, launcher.name)
    recipe = load_recipe([], overrides, with_site=True)
    return [job for job in launcher.find(recipe) if job.id not in known]


def _ledger_ids(folder: Path, launcher: str) -> set[str | None]:
    ids: set[str | None] = set()
    for path in sorted(folder.glob("*/ledger.jsonl")):
        ledger = Ledger(RunDir(path.parent).ledger)
        entries = [*ledger.jobs(), *ledger.side_jobs(), *ledger.all()]
        ids |= {entry.id for entry in entries if entry.launcher == launcher}
    return ids


# The state of many jobs at once, as far as their launchers answer in time.

_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class _Question:
    """About one job, or about all of a scheduler that tells of many in one call."""

    launcher: Launcher
    scheduler: str
    """Launcher, job or group of jobs that should answer, in words."""
    jobs: Sequence[Submission]


@dataclass(frozen=True, kw_only=True)
class _JobAnswer:
    run_id: str
    scheduler: str
    answer: Answer

    @property
    def word(self) -> str:
        said = self.answer
        return "no answer" if isinstance(said, ShardyardError) else said.state.value


_Waiting = queue.SimpleQueue[_Question | None]
_Answers = queue.SimpleQueue[_JobAnswer]


def ask_all(
    jobs: Sequence[tuple[RunDir, LedgerEntry]], launchers: Launchers | None, *, within_s: float
) -> dict[str, str]:
    """Return run id -> state of its job, in a word; jobs without an answer in time are left out.

    The reason for a missing answer is logged once for each scheduler.
    """
    waiting, answer_queue = _Waiting(), _Answers()
    asked = [job_of(run_dir, entry) for run_dir, entry in jobs]
    questions = _questions(asked, launchers, answer_queue)
    for question in sorted(questions, key=lambda one: -len(one.jobs)):
        waiting.put(question)
    ends_at = time.monotonic() + within_s

    def ask() -> None:
        while (question := waiting.get()) is not None and time.monotonic() < ends_at:
            _ask(question, waiting, answer_queue)

    # daemons, not a pool: one that hangs in a call must not keep the list from being shown
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(min(_THREADS, len(jobs)))]
    for thread in threads:
        thread.start()
    answers: dict[str, _JobAnswer] = {}
    while len(answers) < len(jobs) and (left_s := ends_at - time.monotonic()) > 0:
        try:
            one = answer_queue.get(timeout=left_s)
        except queue.Empty:
            break
        answers[one.run_id] = one
    for _ in threads:
        waiting.put(None)
    _warn_of(answers.values())
    return {run_id: one.word for run_id, one in answers.items()}


def _questions(
    jobs: Sequence[Submission], launchers: Launchers | None, answer_queue: _Answers
) -> list[_Question]:
    """Return a question for each scheduler that reports many jobs, else one a job, in job order.

    Args:
        answer_queue: Receives the error if there is no such launcher, or it cannot be used.
    """
    questions: list[_Question] = []
    for name in dict.fromkeys(job.launcher for job in jobs):
        of_one = [job for job in jobs if job.launcher == name]
        try:
            launcher = launcher_named(name, launchers)
        except ShardyardError as error:
            for job in of_one:
                answer_queue.put(_JobAnswer(run_id=job.run_id, scheduler=name, answer=error))
            continue
        if not isinstance(launcher, AsksMany):
            questions += [
                _Question(launcher=launcher, scheduler=name, jobs=[job]) for job in of_one
            ]
            continue
        groups: dict[str, list[Submission]] = {}
        for job in of_one:
            groups.setdefault(launcher.scheduler_of(job), []).append(job)
        questions += [
            _Question(
                launcher=launcher, scheduler=f"{name}, {which}" if which else name, jobs=group
            )
            for which, group in groups.items()
        ]
    return questions


def _ask(question: _Question, waiting: _Waiting, answer_queue: _Answers) -> None:
    """Tell what is answered; what cannot be asked at once waits to be asked one by one."""
    launcher, whose, jobs = question.launcher, question.scheduler, question.jobs
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
            waiting.put(_Question(launcher=launcher, scheduler=whose, jobs=[job]))
        return
    except Exception as error:  # noqa: BLE001 - in a thread, where it would be lost
        words = f"launcher {launcher.name} raised {type(error).__name__}: {error}. This is a bug"
        answers = [ShardyardError(f"{words} of the launcher: please report it.")] * len(jobs)
    for job, said in zip(jobs, answers, strict=True):
        answer_queue.put(_JobAnswer(run_id=job.run_id, scheduler=whose, answer=said))


def _warn_of(answers: Iterable[_JobAnswer]) -> None:
    errors: dict[str, list[ShardyardError]] = {}
    for one in answers:
        if isinstance(one.answer, ShardyardError):
            errors.setdefault(one.scheduler, []).append(one.answer)
    for whose, of_one in errors.items():
        jobs = "1 job" if len(of_one) == 1 else f"{len(of_one)} jobs"
        warn(f"{whose}: no answer for {jobs}: {of_one[0]}")


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run of a folder, with its newest job where it was launched."""

    run_dir: RunDir
    state: RunState
    """State by its folder."""
    entry: LedgerEntry | None
    """Its newest job, of a side job where it has no other; None: it was not launched."""
    job_state: str | None
    """State of the job by its launcher, in a word; None: not asked, or no answer in time."""

    def to_json(self) -> dict[str, Any]:
        """Return the content that `shardyard runs --json` prints of it."""
        content: dict[str, Any] = json_value(asdict(self.state))
        account = self.account()
        owned = {} if account is None else account.to_json()
        return {**content, "job": self._job_json(), **owned}

    def account(self) -> RunAccount | None:
        """Return who it belongs to and what it has cost; None: its folder cannot be read."""
        try:
            return account_of(self.run_dir, self.entry)
        except (OSError, StorageError, ValueError) as error:
            warn(f"cost of run {self.state.id} cannot be read: {error}")
            return None

    def _job_json(self) -> dict[str, str | None] | None:
        entry = self.entry
        if entry is None:
            return None
        side = {"side": entry.details[SIDE_DETAIL]} if SIDE_DETAIL in entry.details else {}
        return {"launcher": entry.launcher, "id": entry.id, "state": self.job_state, **side}


def list_runs(
    folder: Path, *, launchers: Launchers | None = None, within_s: float = 1.0
) -> list[ListedRun]:
    """List the runs in a folder, the most recently changed last.

    Args:
        folder: ``run.dir`` of their recipes.
        launchers: Launchers by name, in place of all known ones.
        within_s: Time for all launchers together to answer for the states of jobs.
    """
    states = sorted(_read_all(folder), key=lambda state: (state.updated_at or 0, state.id))
    folders = {state.id: RunDir((folder / state.id).resolve()) for state in states}
    jobs = _jobs(list(folders.values()))
    asked = [
        (folders[state.id], jobs[state.id])
        for state in reversed(states)  # the newest first: those a reader looks for
        if state.id in jobs and state.state != "finished"
    ]
    job_states = ask_all(asked, launchers, within_s=within_s)
    return [
        ListedRun(
            run_dir=folders[state.id],
            state=state,
            entry=jobs.get(state.id),
            job_state=job_states.get(state.id),
        )
        for state in states
    ]


def _read_all(folder: Path) -> list[RunState]:
    if not folder.is_dir():
        return []
    found = [each for each in folder.iterdir() if is_run(each)]
    states = [read_state_in_list(RunDir(each)) for each in found]
    for state in states:
        if state.problem is not None:
            warn(f"run {state.id} cannot be read: {state.problem}")
    return states


def _jobs(folders: Sequence[RunDir]) -> dict[str, LedgerEntry]:
    """Run id -> its newest job, of those that were launched; a side job where it has no other."""
    found = {}
    for run_dir in folders:
        try:
            ledger = Ledger(run_dir.ledger)
            jobs = ledger.jobs() or ledger.side_jobs()
            warn_unfinished(run_dir, ledger)
        except StorageError as error:  # does not keep the others from being shown
            warn(str(error))
            continue
        if jobs:
            found[run_dir.run_id] = jobs[-1]
    return found
