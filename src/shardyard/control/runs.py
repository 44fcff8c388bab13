"""The runs in a folder and how they stand, with the jobs of launched ones."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.control.job import Job, job_of, warn_unfinished
from shardyard.control.states import ask_all
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import StorageError
from shardyard.launchers.ledger import SIDE_DETAIL, Entry, Ledger
from shardyard.log import warn
from shardyard.rundir.jsonl import json_value
from shardyard.rundir.layout import RunDir, is_run
from shardyard.rundir.state import RunState, read_state_in_list


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a folder."""

    run_dir: RunDir
    state: RunState
    """As its folder tells."""
    entry: Entry | None
    """Its newest job, of a side job where it has no other; None: it was not launched."""
    job_state: str | None
    """What its launcher says of the job, in a word; None: not asked, or not told in time."""
    launchers: Launchers | None = None

    @property
    def job(self) -> Job | None:
        """Its newest job; None: it was not launched.

        Raises:
            RequestError: Its launcher is not here.
        """
        if self.entry is None:
            return None
        submission = job_of(self.run_dir, self.entry)
        return Job(
            run_dir=self.run_dir,
            submission=submission,
            launcher=launcher_named(submission.launcher, self.launchers),
            ledger=Ledger(self.run_dir.ledger),
        )

    def to_json(self) -> dict[str, Any]:
        """What `shardyard runs --json` prints of it."""
        content: dict[str, Any] = json_value(asdict(self.state))
        return {**content, "job": self._job_json()}

    def _job_json(self) -> dict[str, str | None] | None:
        entry = self.entry
        if entry is None:
            return None
        side = {"side": entry.details[SIDE_DETAIL]} if SIDE_DETAIL in entry.details else {}
        return {"launcher": entry.launcher, "id": entry.id, "state": self.job_state, **side}


def runs(
    runs_dir: str | Path = "runs", *, launchers: Launchers | None = None, within_s: float = 1.0
) -> list[Run]:
    """The runs in a folder, the most recently changed last.

    Args:
        runs_dir: ``run.dir`` of their recipes.
        launchers: Name -> launcher, in place of all that there are.
        within_s: How long launchers are asked for the states of jobs.
    """
    folder = Path(runs_dir)
    states = sorted(_read_all(folder), key=lambda state: (state.updated_at or 0, state.id))
    folders = {state.id: RunDir((folder / state.id).resolve()) for state in states}
    jobs = _jobs(list(folders.values()))
    asked = [
        (folders[state.id], jobs[state.id])
        for state in reversed(states)  # the newest first: those a reader looks for
        if state.id in jobs and state.state != "finished"
    ]
    told = ask_all(asked, launchers, within_s=within_s)
    return [
        Run(
            run_dir=folders[state.id],
            state=state,
            entry=jobs.get(state.id),
            job_state=told.get(state.id),
            launchers=launchers,
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


def _jobs(folders: Sequence[RunDir]) -> dict[str, Entry]:
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
