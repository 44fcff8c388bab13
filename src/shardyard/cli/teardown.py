"""`shardyard teardown`: removes what launching created elsewhere, and says what is left.

The ledger names it, so nothing is searched for by guess. No launcher creates what holds data, so
none is removed: the run's own folder, volumes and file systems stay.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from shardyard.cli.launched import job_of, launchers_in
from shardyard.cli.launching import Launchers, confirm, launcher_named
from shardyard.cli.options import json_option, run_argument, runs_dir_option, trust_option
from shardyard.cli.terminal import say, tell
from shardyard.config.load import load_recipe
from shardyard.errors import RequestError, ShardyardError
from shardyard.launch.base import Removal
from shardyard.launch.ledger import SIDE_DETAIL, Entry, Ledger
from shardyard.launch.trust import refuse_untrusted
from shardyard.rundir.layout import RunDir, find_run


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What a tear-down did, and did not."""

    removed: list[str]
    left: list[str]
    """Created by this run, and still there."""
    untouched: list[str]
    """Used by this run, but not created by it."""
    foreign: list[str] = field(default_factory=list)
    """Found under a name or number of the ledger, and not the run's."""
    over: list[str] = field(default_factory=list)
    """Jobs that ended: they cost nothing any more, and the ledger still names them."""


@click.command()
@run_argument
@runs_dir_option
@click.option("--dry-run", is_flag=True, help="List what would be removed; remove nothing.")
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask.")
@click.option("--force", "is_forced", is_flag=True, help="Also while the job is not over.")
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    runs_dir: Path,
    dry_run: bool,
    is_yes: bool,
    is_forced: bool,
    trusts_folder: bool,
    as_json: bool,
) -> int:
    """Remove what RUN (a path, an id, or the beginning of one) has elsewhere. Safe to repeat."""
    run_dir = find_run(run, runs_dir)
    refuse_untrusted(run_dir.ledger, trusts_folder=trusts_folder)
    ledger = Ledger(run_dir.ledger)
    live, untouched = ledger.live(), _foreign(run_dir)
    launchers = launchers_in(context)
    if dry_run or not live:
        ended = _ended(run_dir, ledger, launchers)
        remains = Remains(
            removed=[],
            left=_names([entry for entry in live if entry.id not in ended]),
            untouched=untouched,
            over=_names([entry for entry in live if entry.id in ended]),
        )
        _show(run_dir, remains, as_json=as_json)
        return 0
    if not is_forced:
        _refuse_running(run_dir, ledger, launchers)
    say(f"to be removed: {', '.join(_names(live))}")
    confirm("remove it?", is_yes=is_yes)
    removal = _remove(run_dir, ledger, launchers)
    remains = Remains(
        removed=removal.removed,
        foreign=removal.foreign,
        left=_names(ledger.live()),
        untouched=untouched,
    )
    _show(run_dir, remains, as_json=as_json)
    return 1 if remains.left else 0


def _remove(run_dir: RunDir, ledger: Ledger, launchers: Launchers | None) -> Removal:
    """Ask each job's launcher, the newest job first, side jobs too, until nothing is left."""
    removal = Removal()
    # an interrupted submission has objects and no job: its newest object stands for it
    jobs = [*reversed(ledger.side_jobs()), *reversed(ledger.jobs())]
    for entry in [*jobs, *reversed(ledger.live())]:
        if any(one.launcher == entry.launcher for one in ledger.live()):
            launcher = launcher_named(entry.launcher, launchers)
            found = launcher.remove(job_of(run_dir, entry), ledger)
            removal.removed.extend(found.removed)
            removal.foreign.extend(found.foreign)
    return removal


def _ended(run_dir: RunDir, ledger: Ledger, launchers: Launchers | None) -> set[str | None]:
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
            say(f"warning: whether job {job.id} is over is not known: {error}")
            continue
        if status.state.is_over:
            ended.add(entry.id)
    return ended


def _refuse_running(run_dir: RunDir, ledger: Ledger, launchers: Launchers | None) -> None:
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


def _names(entries: Sequence[Entry]) -> list[str]:
    """In the order of removal; one that was not confirmed may not exist."""
    return [
        f"{entry.kind} {entry.name}" + ("" if entry.is_confirmed else " (perhaps)")
        for entry in reversed(entries)
    ]


def _foreign(run_dir: RunDir) -> list[str]:
    """Storage that the run used and somebody else made."""
    found = []
    for volume in load_recipe([run_dir.recipe], of_run=True).launch.volumes:
        if volume.claim is not None:
            found.append(f"persistent volume claim {volume.claim}")
        if volume.efs is not None:
            found.append(f"EFS file system {volume.efs}")
    return found


def _show(run_dir: RunDir, remains: Remains, *, as_json: bool) -> None:
    if as_json:
        content = {
            "run_id": run_dir.run_id,
            "removed": remains.removed,
            "foreign": remains.foreign,
            "left": remains.left,
            "over": remains.over,
            "untouched": remains.untouched,
        }
        tell(json.dumps(content, indent=1))
        return
    for name in remains.removed:
        tell(f"removed: {name}")
    for name in remains.foreign:
        tell(f"not this run's, so left alone: {name}")
    for name in remains.over:
        tell(f"over, so it costs nothing; a tear-down strikes it from the ledger: {name}")
    for name in remains.left:
        tell(f"still there, and may cost money: {name}")
    for name in remains.untouched:
        tell(f"not created by this run, so not removed, and may cost money: {name}")
    if not (remains.left or remains.over):
        tell(f"nothing of run {run_dir.run_id} is left elsewhere; {run_dir.path} stays")
