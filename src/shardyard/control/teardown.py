"""Remove what launching created elsewhere: the ledger names it, without guesses."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardyard.config.load import load_recipe
from shardyard.control.job import job_of, latest_job_recipe
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.base import Removal
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger, LedgerEntry
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.log import info, warn
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import latest_script


@dataclass(frozen=True, kw_only=True)
class TeardownResult:
    """Result of a tear-down: removed and remaining resources."""

    removed: list[str]
    foreign: list[str] = field(default_factory=list)
    """Found under a name or number of the ledger, and not the run's."""
    left: list[str]
    """Created by this run, and still there."""
    over: list[str] = field(default_factory=list)
    """Jobs that ended: they cost no more money, and the ledger still names them."""
    untouched: list[str]
    """Used by this run, but not created by it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def preview_teardown(
    run_dir: RunDir, *, launchers: Launchers | None = None, trusts_folder: bool = False
) -> TeardownResult:
    """Return what a tear-down would find. Only asks schedulers which jobs are over."""
    check_trusted(run_dir.ledger, trusts_folder=trusts_folder)
    ledger = Ledger(run_dir.ledger)
    live, ended = ledger.live(), _ended_jobs(run_dir, ledger, launchers)
    return TeardownResult(
        removed=[],
        left=_names_of([entry for entry in live if entry.id not in ended]) + _torn(ledger),
        untouched=_external_storage(run_dir),
        over=_names_of([entry for entry in live if entry.id in ended]),
    )


def tear_down(
    run_dir: RunDir,
    *,
    agree: Callable[[str], None],
    launchers: Launchers | None = None,
    is_forced: bool = False,
    trusts_folder: bool = False,
) -> TeardownResult:
    """Remove what a run has elsewhere. Repeatable.

    Args:
        agree: Asked before, if there is anything; raises if the answer is no.
        is_forced: Also while a job is not over.
        trusts_folder: Also if others may write into the run's folder, and so decide what goes.

    Raises:
        RequestError: A job is not over.
    """
    check_trusted(run_dir.ledger, trusts_folder=trusts_folder)
    ledger = Ledger(run_dir.ledger)
    live = ledger.live()
    if not live:
        return preview_teardown(run_dir, launchers=launchers, trusts_folder=trusts_folder)
    untouched = _external_storage(run_dir)
    if not is_forced:
        _check_not_running(run_dir, ledger, launchers)
    info(f"to be removed: {', '.join(_names_of(live))}")
    agree("remove it?")
    removal = _remove_all(run_dir, ledger, launchers)
    return TeardownResult(
        removed=removal.removed,
        foreign=removal.not_owned,
        left=_names_of(ledger.live()) + _torn(ledger),
        untouched=untouched,
    )


def _remove_all(run_dir: RunDir, ledger: Ledger, launchers: Launchers | None) -> Removal:
    """Ask each job's launcher, the newest job first, side jobs too, until all is removed."""
    removal = Removal()
    # an interrupted submission has objects and no job: its newest object stands for it
    jobs = [*reversed(ledger.side_jobs()), *reversed(ledger.jobs())]
    for entry in [*jobs, *reversed(ledger.live())]:
        if any(one.launcher == entry.launcher for one in ledger.live()):
            launcher = launcher_named(entry.launcher, launchers)
            found = launcher.remove(job_of(run_dir, entry), ledger)
            removal.removed.extend(found.removed)
            removal.not_owned.extend(found.not_owned)
    return removal


def _ended_jobs(run_dir: RunDir, ledger: Ledger, launchers: Launchers | None) -> set[str | None]:
    """Ids of jobs that the ledger still names and that are over, as their schedulers say."""
    named = {entry.id for entry in ledger.live()}
    ended: set[str | None] = set()
    for entry in [*ledger.jobs(), *ledger.side_jobs()]:
        if entry.id not in named:
            continue
        job = job_of(run_dir, entry)
        try:
            status = launcher_named(job.launcher, launchers).status(job)
        except ShardyardError as error:  # then it may cost money
            warn(f"whether job {job.id} is over is not known: {error}")
            continue
        if status.state.is_over:
            ended.add(entry.id)
    return ended


def _check_not_running(run_dir: RunDir, ledger: Ledger, launchers: Launchers | None) -> None:
    handle, named = run_dir.handle, {entry.id for entry in ledger.live()}
    side_jobs = [entry for entry in ledger.side_jobs() if entry.id in named]
    for entry in [*ledger.jobs()[-1:], *side_jobs]:
        job, is_side = job_of(run_dir, entry), SIDE_DETAIL in entry.details
        status = launcher_named(job.launcher, launchers).status(job)
        if status.state.is_over:
            continue
        loss = "what it is doing" if is_side else "the steps since its last checkpoint"
        words = f"{handle}{' --side' * is_side}"
        raise RequestError(
            f"{'side ' * is_side}job {job.id} of run {run_dir.run_id} is {status.state.value}. "
            f"Removing it now would lose {loss}. Use `shardyard cancel {words}`, then "
            f"`shardyard watch {words}` until it is over; or --force."
        )


def _names_of(entries: Sequence[LedgerEntry]) -> list[str]:
    """In the order of removal; one that was not confirmed may not exist."""
    return [
        f"{entry.kind} {entry.name}" + ("" if entry.is_confirmed else " (perhaps)")
        for entry in reversed(entries)
    ]


def _torn(ledger: Ledger) -> list[str]:
    """Describe what a line that breaks off at the end of the ledger may have named."""
    return [
        f"(perhaps) what line {number} of {ledger.path} named. It breaks off, as a power cut "
        "leaves a file: look for the run's jobs with the scheduler's own tools, end them, then "
        f"remove it with `sed -i {number}d {shlex.quote(str(ledger.path))}`"
        for number in ledger.torn_lines()
    ]


def _external_storage(run_dir: RunDir) -> list[str]:
    """Storage that the run used and somebody else made."""
    found: list[str] = []
    if latest_script(run_dir) is not None:
        return found
    try:
        recipe = load_recipe([latest_job_recipe(run_dir)], of_run=True)
    except ShardyardError as error:  # a lost recipe keeps no job running
        warn(f"which volumes and file systems the run used is not known: {error}")
        return []
    for volume in recipe.launch.volumes:
        if volume.claim is not None:
            found.append(f"persistent volume claim {volume.claim}")
        if volume.efs is not None:
            found.append(f"EFS file system {volume.efs}")
    return found
