"""`shardyard fetch`: what a run made elsewhere, brought into its folder here."""

import json
from pathlib import Path

import click

from shardyard.cli.confirm import side_terms
from shardyard.cli.options import (
    json_option,
    launchers_in,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.progress import bytes_progress
from shardyard.control.fetch import FetchResult, fetch_run
from shardyard.control.run_location import locate_run
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo
from shardyard.rundir.layout import RunDir, find_run
from shardyard.units import format_bytes

_ALL = "all"


@click.command()
@run_argument
@click.option("--to", type=LocalPath(path_type=Path), help="Local folder. Default: the run folder.")
@click.option(
    "--step",
    default="latest",
    show_default=True,
    help="Checkpoint to copy: a step, latest or best.",
)
@click.option("--all", "is_all", is_flag=True, help="Copy every complete checkpoint.")
@click.option("--via", metavar="s3://BUCKET/PREFIX", help="Copy through S3; required on AWS Batch.")
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation.")
@trust_option
@runs_dir_option
@click.option(
    "--dry-run", is_flag=True, help="Show what would be copied or submitted, without doing it."
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    to: Path | None,
    step: str,
    is_all: bool,
    via: str | None,
    is_yes: bool,
    trusts_folder: bool,
    runs_dir: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy the results of a remote RUN: checkpoint, report, logs, events and metrics.

    Files that are already here are not copied again. Repeat an interrupted command to continue.
    """
    if is_all and step != "latest":
        raise click.UsageError("--all and --step exclude each other.")
    home = locate_run(find_run(run, runs_dir), launchers_in(context))
    target = home.run_dir if to is None else RunDir(to.absolute())
    terms = side_terms(is_yes=is_yes, dry_run=dry_run, as_json=as_json, trusts_folder=trusts_folder)
    brought = fetch_run(home, target, _ALL if is_all else step, via, terms, progress=bytes_progress)
    if brought is None:
        return
    if as_json:
        echo(json.dumps({**brought.to_json(), "dry_run": dry_run}, indent=1))
    elif not dry_run and (brought.steps or brought.files):
        echo(_sentence(brought))


def _sentence(result: FetchResult) -> str:
    steps = ", ".join(map(str, result.steps))
    checkpoints = f"checkpoint of step {steps}" if result.steps else "no checkpoint"
    if not result.files:
        return f"{result.to} has all of it already: {checkpoints}, every file held to its SHA-256"
    return (
        f"{result.to}: {checkpoints}; {result.files} files, {format_bytes(result.bytes)} came, "
        "each held to its SHA-256"
    )
