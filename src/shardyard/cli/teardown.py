"""`shardyard teardown`: removes what launching created remotely, and says what is left.

The ledger lists it, so there is no search by guess. Launchers create no storage, so none is
removed: the run's own folder, volumes and file systems stay.
"""

import json
from functools import partial
from pathlib import Path

import click

from shardyard.cli.confirm import confirm
from shardyard.cli.options import (
    json_option,
    launchers_in,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.control.teardown import TeardownResult, preview_teardown, tear_down
from shardyard.io.terminal import echo, echo_err
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir, find_run


@click.command()
@run_argument
@runs_dir_option
@click.option("--dry-run", is_flag=True, help="List what would be removed, without removing it.")
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--force", "is_forced", is_flag=True, help="Also remove a job that has not ended.")
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
    """Remove everything that launching RUN (path, id or its beginning) created.

    The run folder here stays. Safe to repeat."""
    run_dir, launchers = find_run(run, runs_dir), launchers_in(context)
    if dry_run:
        remains = preview_teardown(run_dir, launchers=launchers, trusts_folder=trusts_folder)
    else:
        agree = partial(confirm, is_yes=is_yes)
        try:
            remains = tear_down(
                run_dir,
                agree=agree,
                launchers=launchers,
                is_forced=is_forced,
                trusts_folder=trusts_folder,
            )
        except (click.Abort, KeyboardInterrupt):
            echo_err(_retry_hint(run_dir))
            raise
    _show(run_dir, remains, as_json=as_json)
    return 1 if remains.left and not dry_run else 0


def _retry_hint(run_dir: RunDir) -> str:
    left = len(Ledger(run_dir.ledger).live())
    return (
        f"not finished: {left} object{'s' * (left != 1)} of the run may still exist, and cost "
        "money. What was removed is crossed out in its ledger. Repeat `shardyard teardown "
        f"{run_dir.handle}` to remove the rest."
    )


def _show(run_dir: RunDir, remains: TeardownResult, *, as_json: bool) -> None:
    if as_json:
        echo(json.dumps({"run_id": run_dir.run_id, **remains.to_json()}, indent=1))
        return
    for name in remains.removed:
        echo(f"removed: {name}")
    for name in remains.foreign:
        echo(f"not this run's, so kept: {name}")
    for name in remains.over:
        echo(f"ended, so it costs no money; teardown crosses it out in the ledger: {name}")
    for name in remains.left:
        echo(f"still there, and may cost money: {name}")
    for name in remains.untouched:
        echo(f"not created by this run, so not removed, and may cost money: {name}")
    if not (remains.left or remains.over):
        echo(f"all objects of run {run_dir.run_id} are removed; {run_dir.path} stays")
