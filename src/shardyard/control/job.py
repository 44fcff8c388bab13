"""Jobs of launched runs: find one from its run's folder, ask for its status, and wait for it."""

import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardyard.config.load import load_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import (
    EXIT_DRAINED,
    AccessError,
    CapacityError,
    RequestError,
    ShardyardError,
    StorageError,
)
from shardyard.io.files import MOST_JSON_BYTES, parse_json, read_plain
from shardyard.launchers.base import JobState, JobStatus, Launcher
from shardyard.launchers.ledger import (
    BENCH_DETAIL,
    SCRIPT_DETAIL,
    SIDE_DETAIL,
    Ledger,
    LedgerEntry,
    Submission,
)
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.launchers.log_markers import NONCE_DETAIL, rebuild
from shardyard.log import info, warn
from shardyard.rundir.layout import RunDir, find_run
from shardyard.rundir.lease import is_locked
from shardyard.rundir.script import latest_script

_EXIT_CODES = {
    JobState.SUCCEEDED: 0,
    JobState.DRAINED: EXIT_DRAINED,
    JobState.CANCELLED: EXIT_DRAINED,
}
"""Exit codes of jobs whose scheduler keeps none; all others failed."""


Which = Literal["training", "side", "any"]
"""Job of a run to find; any: the training, and where there is none the side job."""


@dataclass(frozen=True, kw_only=True)
class LaunchedJob:
    """Newest job of a run, a training or a side job, and its launcher."""

    run_dir: RunDir
    submission: Submission
    launcher: Launcher
    ledger: Ledger

    @property
    def run_id(self) -> str:
        """The run's, which every verb of the command line takes."""
        return self.run_dir.run_id

    @property
    def id(self) -> str:
        """The scheduler's."""
        return self.submission.id

    @property
    def name(self) -> str:
        """Name of the job in the scheduler."""
        return self.submission.name

    @property
    def on(self) -> str:
        """Name of the launcher."""
        return self.submission.launcher

    @property
    def nonce(self) -> str:
        """Mark of the lines of its node 0; empty for a job from before there was one."""
        return self.submission.details.get(NONCE_DETAIL, "")

    @property
    def is_side(self) -> bool:
        """Whether the job is a side job, which does not train."""
        return SIDE_DETAIL in self.submission.details

    def recipe(self) -> Recipe:
        """Return the recipe that was asked of the job."""
        return load_recipe([latest_job_recipe(self.run_dir)], of_run=True)

    def most_nodes(self) -> int:
        """Return the largest number of nodes that the job can have."""
        if self.is_side:
            return 1
        recipe = self.recipe()
        most = recipe.elastic.max_nodes
        return recipe.cluster.nodes if most == "auto" else most

    def status(self) -> JobStatus:
        """Return the job's status from the scheduler."""
        return self.launcher.status(self.submission)

    def fetch(self) -> None:
        """Add what node 0 has printed to our folder, if the nodes' folder is out of reach."""
        if not (self.is_side or self.launcher.capabilities.shares_folder):
            lines = self.launcher.logs(self.submission, node=0, follow=False)
            rebuild((line.text for line in lines), self.run_dir.path, nonce=self.nonce)

    def state(self) -> JobState:
        """In a word, what the scheduler says of the job now."""
        return self.status().state


def find_launched(
    run: str, runs_dir: Path, launchers: Launchers | None = None, *, which: Which = "any"
) -> LaunchedJob:
    """The newest job of a run.

    Args:
        run: A path, an id, or a unique prefix of one.

    Raises:
        RequestError: There is no such run, or it has no job.
    """
    return launched_of(find_run(run, runs_dir), launchers, which=which)


def is_trained_here(run_dir: RunDir) -> bool:
    """Whether `shardyard train` started a run, so that no scheduler knows it."""
    ledger = Ledger(run_dir.ledger)
    return not (ledger.jobs() or ledger.side_jobs() or ledger.live())


def script_of(run_dir: RunDir) -> tuple[str, ...] | None:
    """Return script and arguments that the newest job runs; None: it runs no script.

    Raises:
        StorageError: The ledger's line is damaged.
    """
    jobs = Ledger(run_dir.ledger).jobs()
    text = jobs[-1].details.get(SCRIPT_DETAIL) if jobs else None
    if text is None:
        return None
    try:
        words = parse_json(text)
        if not words or not all(isinstance(word, str) for word in words):
            raise ValueError
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{run_dir.ledger}: the last job has a script that cannot be read: {text[:100]!r}. "
            "Launch the script again as a new run."
        ) from error
    return tuple(words)


def starter_of(run_dir: RunDir) -> str:
    """Describe what started a run without a job."""
    return "`shardyard train`" if latest_script(run_dir) is None else "a script of your own"


def find_steered(
    run: str,
    runs_dir: Path,
    launchers: Launchers | None = None,
    *,
    trusts_folder: bool,
    which: Which = "training",
) -> LaunchedJob:
    """Find a job like ``find_launched``, for a verb that ends or changes it.

    Raises:
        AccessError: Another user may have decided which job that is.
    """
    run_dir = find_run(run, runs_dir)
    check_trusted(run_dir.ledger, trusts_folder=trusts_folder)
    return launched_of(run_dir, launchers, which=which)


def launched_of(
    run_dir: RunDir, launchers: Launchers | None = None, *, which: Which = "training"
) -> LaunchedJob:
    """Return a job like ``find_launched``, for a run that is found."""
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
    if which != "side":
        warn_unfinished(run_dir, ledger)
    job = job_of(run_dir, jobs[-1])
    launcher = launcher_named(job.launcher, launchers)
    return LaunchedJob(run_dir=run_dir, submission=job, launcher=launcher, ledger=ledger)


def warn_unfinished(run_dir: RunDir, ledger: Ledger) -> None:
    """Say what a submission that was cut off may have created: it may run and cost money."""
    if unfinished := ledger.unfinished():
        warn(_interrupted(run_dir, unfinished))


def check_submission_finished(run_dir: RunDir) -> None:
    """Raise if a submission was cut off: what it created may train the run.

    Raises:
        RequestError: It was.
    """
    if unfinished := Ledger(run_dir.ledger).unfinished():
        raise RequestError(_interrupted(run_dir, unfinished))


def _interrupted(run_dir: RunDir, entries: Sequence[LedgerEntry]) -> str:
    names = ", ".join(f"{entry.kind} {entry.name}" for entry in entries)
    return (
        f"a submission of run {run_dir.run_id} was interrupted before it became a job. What may "
        f"have been created, and may run: {names}. Remove it with `shardyard teardown "
        f"{run_dir.handle}`, then submit again."
    )


def reject_bench(run_dir: RunDir) -> None:
    """Raise if the folder is that of a benchmark, which does not train."""
    kinds = [entry.details.get(BENCH_DETAIL) for entry in Ledger(run_dir.ledger).jobs()]
    if not any(kinds):
        return
    raise RequestError(
        f"run {run_dir.run_id} is a benchmark (bench {kinds[-1]}) which does not train and has no "
        f"checkpoint to continue from. Its tables are in `shardyard logs {run_dir.handle}`. "
        f"`shardyard bench {kinds[-1]} RECIPE --on LAUNCHER` measures again, `shardyard launch` "
        "starts a training."
    )


def fetch_progress(launched: LaunchedJob) -> None:
    """Fetch the progress; a failure only warns, as the caller's own request matters more."""
    try:
        launched.fetch()
    except ShardyardError as error:
        warn(f"no progress can be read: {error}")


def job_of(run_dir: RunDir, entry: LedgerEntry) -> Submission:
    """Return the job that a line of the ledger describes."""
    return Submission(
        launcher=entry.launcher,
        run_id=run_dir.run_id,
        id=entry.id or "",
        name=entry.name,
        details=entry.details,
    )


def latest_job_recipe(run_dir: RunDir) -> Path:
    """The recipe of the newest job of a launched run.

    Of the first job there are two copies, and what a power cut left of one is passed over.

    Raises:
        StorageError: It is lost.
    """
    number = len(Ledger(run_dir.ledger).jobs())
    asked = run_dir.submission(number)
    if number > 1:
        return _sound(asked)
    if not asked.is_file():
        return _sound(run_dir.recipe)
    damage, text = _damage(asked), asked.read_bytes()
    is_torn = _damage(run_dir.recipe) is None and run_dir.recipe.read_bytes().startswith(text)
    return run_dir.recipe if is_torn else asked if damage is None else _sound(run_dir.recipe)


def _sound(recipe: Path) -> Path:
    damage = _damage(recipe)
    if damage is None:
        return recipe
    raise StorageError(
        f"{recipe} {damage}, as a power cut leaves a file. It holds what this run was asked. The "
        "job itself has its own copy. Bring the file back: `shardyard cancel`, `shardyard "
        "teardown` and `shardyard logs` work without it."
    )


def _damage(recipe: Path) -> str | None:
    try:
        text = read_plain(recipe, limit_bytes=MOST_JSON_BYTES)
    except FileNotFoundError as error:
        return f"cannot be read ({error.strerror})"
    except StorageError as error:
        return str(error).removeprefix(f"{recipe} ").removesuffix(".")
    return "is empty" if not text.strip() else "holds NUL bytes" if b"\0" in text else None


def exit_code_of(status: JobStatus) -> int:
    """Return the exit code for how a job ended, by the codes of every verb."""
    if status.exit_code is not None:
        return status.exit_code
    return _EXIT_CODES.get(status.state, 1)


def describe_job(job: Submission, status: JobStatus) -> dict[str, Any]:
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
            f"run {run_dir.run_id} has no training: the files in its folder are from side jobs. "
            f"See them with `shardyard status {run_dir.handle} --side`."
        )
    live = ledger.live()
    if live:
        return _interrupted(run_dir, live)
    stop = "It is not running." if not is_locked(run_dir.lease) else "Stop it with Ctrl-C there."
    return (
        f"run {run_dir.run_id} has no job: it was started by {starter_of(run_dir)}, not launched. "
        f"{stop} `shardyard status {run_dir.handle}` shows its state, and `shardyard report "
        f"{run_dir.handle}` its results."
    )


_FIRST_POLL_S, _LONGEST_POLL_S = 0.5, 10.0


_ASKED_AGAIN = 30
"""Times, ``_LONGEST_POLL_S`` apart: a controller that is restarted is away for minutes."""


def wait_until(
    launched: LaunchedJob,
    is_enough: Callable[[JobStatus], bool],
    *,
    give_up_after_s: float = math.inf,
    reported_states: Container[JobState] = (JobState.WAITING,),
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Ask for the job's status until it is enough, or too much time has passed.

    Args:
        reported_states: States in which each new reason is logged.

    Returns:
        The last one, which is not enough if it was given up.
    """
    said, poll_s, waited_s = "", _FIRST_POLL_S, 0.0
    while True:
        status = _ask(launched, sleep=sleep)
        if is_enough(status) or waited_s >= give_up_after_s:
            return status
        if status.state in reported_states and status.reason != said:
            said = status.reason
            info(f"{status.state.value}: {said}")
        sleep(poll_s)
        waited_s += poll_s
        poll_s = min(_LONGEST_POLL_S, poll_s * 1.5)


PLACED_WITHIN_S = 300.0
"""Seconds for an autoscaler to add a node; a job that no node can hold waits no longer than
that.
"""


def wait_until_placed(
    launched: LaunchedJob, *, sleep: Callable[[float], None] = time.sleep, remedy: str
) -> JobStatus:
    """Wait until a job no longer waits.

    Args:
        remedy: What to do about a job that no node can hold.

    Raises:
        CapacityError: The scheduler finds no node for it, for ``PLACED_WITHIN_S``. The job stays.
    """
    unplaced_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal unplaced_s
        unplaced_s += seconds
        sleep(seconds)

    def is_enough(now: JobStatus) -> bool:
        nonlocal unplaced_s
        if not now.is_unplaced:
            unplaced_s = 0.0
        return now.state != JobState.WAITING or unplaced_s >= PLACED_WITHIN_S

    status = wait_until(launched, is_enough, sleep=pause)
    if status.state != JobState.WAITING:
        return status
    raise CapacityError(
        f"job {launched.id} ({launched.name}) on {launched.on} found no node for "
        f"{PLACED_WITHIN_S:g} s: {status.reason}. {remedy}"
    )


def _ask(launched: LaunchedJob, *, sleep: Callable[[float], None]) -> JobStatus:
    """Return the job's status; ask a scheduler that does not answer again for a while."""
    for attempt in range(_ASKED_AGAIN):
        try:
            return launched.status()
        except ShardyardError as error:
            if isinstance(error, RequestError | AccessError):
                raise  # asking again cannot help
            if attempt == 0:
                warn(f"{error} Trying again.")
            sleep(_LONGEST_POLL_S)
    return launched.status()
