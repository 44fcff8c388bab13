"""`shardyard cancel`: asks a launched run to make its last step durable and end."""

import json
from pathlib import Path

import click

from shardyard.cli.options import (
    json_option,
    launchers_in,
    run_argument,
    runs_dir_option,
    side_option,
    trust_option,
)
from shardyard.control.job import LaunchedJob, Which, describe_job, find_steered
from shardyard.io.terminal import echo


@click.command()
@run_argument
@runs_dir_option
@click.option(
    "--dry-run", is_flag=True, help="Show what would be cancelled, without cancelling it."
)
@side_option
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    runs_dir: Path,
    dry_run: bool,
    is_side: bool,
    trusts_folder: bool,
    as_json: bool,
) -> None:
    """Ask the job of RUN (path, id or its beginning) to save and stop. Safe to repeat."""
    which: Which = "side" if is_side else "any"
    launched = find_steered(
        run, runs_dir, launchers_in(context), trusts_folder=trusts_folder, which=which
    )
    status = launched.status()
    job = f"{'side ' * launched.is_side}job {launched.id} on {launched.on}"
    if status.state.is_over:
        words = f"{job} is over already: {status.state.value}"
    elif dry_run:
        save = "" if launched.is_side else "save and "
        words = f"{job} is {status.state.value} and would be asked to {save}end"
    else:
        launched.launcher.cancel(launched.submission)
        words = f"{job} was asked to {_next_steps(launched)}"
    if as_json:
        content = {**describe_job(launched.submission, status), "message": words}
        echo(json.dumps(content, indent=1))
    else:
        echo(words)


def _next_steps(launched: LaunchedJob) -> str:
    handle = launched.run_dir.handle
    if launched.is_side:
        return (
            f"end. `shardyard watch {handle} --side` follows it there; the command that started it "
            "starts another, which continues where this one stops"
        )
    return (
        f"save and end. `shardyard watch {handle}` follows it there, `shardyard resume {handle}` "
        "continues it later"
    )
