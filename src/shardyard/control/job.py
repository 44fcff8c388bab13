"""A run that was launched: its job and launcher, found from the run's folder."""

import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardyard.config.load import load_recipe
from shardyard.config.schema import Recipe
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import EXIT_DRAINED, AccessError, RequestError, ShardyardError
from shardyard.launch.base import Job, JobState, JobStatus, Launcher
from shardyard.launch.ledger import SIDE_DETAIL, Entry, Ledger
from shardyard.launch.marked import NONCE_DETAIL, rebuild
from shardyard.launch.trust import refuse_untrusted
from shardyard.rundir.layout import RunDir, find_run
from shardyard.talk import say, warn

_EXIT_CODES = {
    JobState.SUCCEEDED: 0,
    JobState.DRAINED: EXIT_DRAINED,
    JobState.CANCELLED: EXIT_DRAINED,
}
"""Of jobs whose scheduler keeps none; all others failed."""


Which = Literal["training", "side", "any"]
"""Which job of a run is meant; any: the training, and where there is none the side job."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A run, its newest training or side job, and who answers for it."""

    run_dir: RunDir
    job: Job
    launcher: Launcher
    ledger: Ledger

    @property
    def nonce(self) -> str:
        """What its node 0 marks its lines with; empty for a job of before there was one."""
        return self.job.details.get(NONCE_DETAIL, "")

    @property
    def is_side(self) -> bool:
        """Whether the job is a side job, which trains nothing."""
        return SIDE_DETAIL in self.job.details

    def recipe(self) -> Recipe:
        """What was asked of the job."""
        return load_recipe([newest_asked(self.run_dir)], of_run=True)

    def most_nodes(self) -> int:
        """How many nodes the job can have."""
        if self.is_side:
            return 1
        recipe = self.recipe()
        most = recipe.elastic.max_nodes
        return recipe.cluster.nodes if most == "auto" else most

    def status(self) -> JobStatus:
        """What the scheduler says of the job now."""
        return self.launcher.status(self.job)

    def fetch(self) -> None:
        """Where the nodes' folder is out of reach, add what node 0 has printed to ours."""
        if not (self.is_side or self.launcher.capabilities.shares_folder):
            lines = self.launcher.logs(self.job, node=0, follow=False)
            rebuild((line.text for line in lines), self.run_dir.path, nonce=self.nonce)


def find_launched(
    run: str, runs_dir: Path, launchers: Launchers | None = None, *, which: Which = "any"
) -> Launched:
    """The newest job of a run.

    Args:
        run: A path, an id, or a unique prefix of one.

    Raises:
        RequestError: There is no such run, or it has no job.
    """
    return launched_of(find_run(run, runs_dir), launchers, which=which)


def find_steered(
    run: str,
    runs_dir: Path,
    launchers: Launchers | None = None,
    *,
    trusts_folder: bool,
    which: Which = "training",
) -> Launched:
    """As ``find_launched``, for a verb that ends or changes the job.

    Raises:
        AccessError: Somebody else may have decided which job that is.
    """
    run_dir = find_run(run, runs_dir)
    refuse_untrusted(run_dir.ledger, trusts_folder=trusts_folder)
    return launched_of(run_dir, launchers, which=which)


def launched_of(
    run_dir: RunDir, launchers: Launchers | None = None, *, which: Which = "training"
) -> Launched:
    """As ``find_launched``, of a run that is found."""
    ledger = Ledger(run_dir.ledger)
    match which:
        case "training":
            jobs = ledger.jobs()
        case "side":
            jobs = ledger.side_jobs()
        case "any":
            jobs = ledger.jobs() or ledger.side_jobs()
    if not jobs:
        raise RequestError(_no_job(run_dir, ledger, which))
    job = job_of(run_dir, jobs[-1])
    launcher = launcher_named(job.launcher, launchers)
    return Launched(run_dir=run_dir, job=job, launcher=launcher, ledger=ledger)


def fetch_progress(launched: Launched) -> None:
    """Fetch; how far it has come is worth less than what is asked beside: failing is told alone."""
    try:
        launched.fetch()
    except ShardyardError as error:
        warn(f"no progress can be read: {error}")


def job_of(run_dir: RunDir, entry: Entry) -> Job:
    """The job that a line of the ledger stands for."""
    return Job(
        launcher=entry.launcher,
        run_id=run_dir.run_id,
        id=entry.id or "",
        name=entry.name,
        details=entry.details,
    )


def newest_asked(run_dir: RunDir) -> Path:
    """The recipe of the newest job of a launched run."""
    asked = run_dir.submission(len(Ledger(run_dir.ledger).jobs()))
    return asked if asked.is_file() else run_dir.recipe


def exit_code_of(status: JobStatus) -> int:
    """The exit code that stands for how a job ended, by the codes of every verb."""
    if status.exit_code is not None:
        return status.exit_code
    return _EXIT_CODES.get(status.state, 1)


def describe_job(job: Job, status: JobStatus) -> dict[str, Any]:
    """Plain values for --json."""
    return {
        "run_id": job.run_id,
        "launcher": job.launcher,
        "job_id": job.id,
        "job_name": job.name,
        "state": status.state.value,
        "reason": status.reason,
        "exit_code": status.exit_code,
        "nodes": [{"name": name, "state": state} for name, state in status.nodes],
    }


def _no_job(run_dir: RunDir, ledger: Ledger, which: Which) -> str:
    if which == "side":
        return (
            f"run {run_dir.run_id} has no side job (prepare, export, fetch or probe on a "
            "launcher). Leave --side out for its training."
        )
    if ledger.side_jobs():
        return (
            f"run {run_dir.run_id} has no training: what stands in its folder was prepared or "
            f"asked by side jobs. See them with `shardyard status {run_dir.handle} --side`."
        )
    live = ledger.live()
    if live:
        names = ", ".join(f"{entry.kind} {entry.name}" for entry in live)
        return (
            f"the submission of run {run_dir.run_id} was interrupted before it became a job. "
            f"What may have been created: {names}. Remove it with `shardyard teardown "
            f"{run_dir.handle}`, and launch again."
        )
    return (
        f"run {run_dir.run_id} has no job: it was started by `shardyard train`, not launched. "
        "`shardyard runs` says how it stands, `shardyard report` shows it, and Ctrl-C where it "
        "runs stops it."
    )


_FIRST_POLL_S, _LONGEST_POLL_S = 0.5, 10.0


_ASKED_AGAIN = 30
"""Times, ``_LONGEST_POLL_S`` apart: a controller that is restarted is away for minutes."""


def wait_until(
    launched: Launched,
    is_enough: Callable[[JobStatus], bool],
    *,
    give_up_after_s: float = math.inf,
    shown: Container[JobState] = (JobState.WAITING,),
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Ask for the job's status until it is enough, or too much time has passed.

    Args:
        shown: States in which each new reason is told.

    Returns:
        The last one, which is not enough if it was given up.
    """
    said, poll_s, waited_s = "", _FIRST_POLL_S, 0.0
    while True:
        status = _ask(launched, sleep=sleep)
        if is_enough(status) or waited_s >= give_up_after_s:
            return status
        if status.state in shown and status.reason != said:
            said = status.reason
            say(f"{status.state.value}: {said}")
        sleep(poll_s)
        waited_s += poll_s
        poll_s = min(_LONGEST_POLL_S, poll_s * 1.5)


def _ask(launched: Launched, *, sleep: Callable[[float], None]) -> JobStatus:
    """The job's status; a scheduler that does not answer is asked again for a while."""
    for attempt in range(_ASKED_AGAIN):
        try:
            return launched.status()
        except ShardyardError as error:
            if isinstance(error, RequestError | AccessError):
                raise  # asking again cannot help
            if attempt == 0:
                warn(f"{error} It is asked again.")
            sleep(_LONGEST_POLL_S)
    return launched.status()
