"""`shardyard scale`: continues a launched run with another number of nodes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardyard.cli.launch import SubmitOptions, agree, report_submission
from shardyard.cli.options import (
    as_override,
    json_option,
    launch_options,
    launchers_in,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.watch import watch
from shardyard.control.job import LaunchedJob, describe_job, find_steered
from shardyard.control.scale import Scaled, scale
from shardyard.io.terminal import echo


@click.command()
@run_argument
@click.argument("nodes", type=click.IntRange(min=1))
@runs_dir_option
@launch_options
@click.option("--dry-run", is_flag=True, help="Show what would be done, without changing anything.")
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    run: str,
    *,
    nodes: int,
    runs_dir: Path,
    trusts_folder: bool,
    max_usd: float | None,
    **terms: Any,
) -> int:
    """Continue RUN (path, id or its beginning) on NODES nodes.

    A job with a fixed number of nodes is drained, and a new job is submitted.
    """
    launched = find_steered(run, runs_dir, launchers_in(context), trusts_folder=trusts_folder)
    asked = SubmitOptions(**terms)
    scaled = scale(
        launched,
        nodes,
        as_override(max_usd),
        dry_run=asked.dry_run,
        agree=partial(agree, terms=asked, question="drain it and submit the run again?"),
    )
    if scaled is None:
        return 0
    if scaled.proposal is not None:
        return report_submission(scaled.proposal, scaled.job, asked)
    _answer(launched, nodes, scaled, as_json=asked.as_json)
    is_resized = not scaled.status.state.is_over
    return watch(launched, node=0) if asked.is_followed and is_resized and not asked.dry_run else 0


def _answer(launched: LaunchedJob, nodes: int, scaled: Scaled, *, as_json: bool) -> None:
    if as_json:
        status = describe_job(launched.submission, scaled.status)
        echo(json.dumps({**status, "asked_nodes": nodes, "message": scaled.words}, indent=1))
    else:
        echo(scaled.words)
