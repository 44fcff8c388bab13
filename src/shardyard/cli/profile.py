"""`shardyard profile`: traces of some steps of a run that trains, and where their time went."""

import json
from pathlib import Path

import click

from shardyard.cli.options import (
    json_option,
    launchers_in,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.config.schema.observe import MOST_STEPS
from shardyard.control.profile import (
    ProfileOptions,
    check_profilable,
    request_profile,
    to_json,
    wait,
)
from shardyard.control.run_location import locate_run
from shardyard.io.terminal import echo, echo_err, print_table
from shardyard.report.page import HEADS, profile_rows, profile_words
from shardyard.rundir.layout import find_run


@click.command()
@run_argument
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    default=3,
    show_default=True,
    help="Steps to profile.",
)
@click.option(
    "--ranks",
    default="auto",
    show_default=True,
    help="Ranks to trace: 0-3,8 or all (at most 64). auto: all of up to 8, else 8 spread evenly.",
)
@click.option("--detach", is_flag=True, help="Request the profile and return at once.")
@click.option(
    "--dry-run", is_flag=True, help="Show what would be requested, without requesting it."
)
@trust_option
@runs_dir_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    steps: int,
    ranks: str,
    detach: bool,
    dry_run: bool,
    trusts_folder: bool,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Profile the next steps of RUN (path, id or its beginning) while it trains."""
    home = locate_run(find_run(run, runs_dir), launchers_in(context))
    wish = ProfileOptions(steps=steps, ranks=ranks)
    check_profilable(home, wish)
    handle = home.run_dir.handle
    what = f"a profile of {steps} step{'s' * (steps > 1)} of run {home.run_dir.run_id}"
    if dry_run:
        words = f"{what} would be asked for (ranks: {ranks})"
        echo(json.dumps({"steps": steps, "ranks": ranks, "message": words}) if as_json else words)
        return
    id = request_profile(home, wish, trusts_folder=trusts_folder)
    if detach:
        words = f"{what} is requested; `shardyard report {handle}` shows it"
        echo(json.dumps({"id": id, "message": words}) if as_json else words)
        return
    echo_err(f"{what} is requested; it begins with a step of the next seconds")
    try:
        profile, folder = wait(home, id)
    except KeyboardInterrupt:
        echo_err(f"waiting ended, the profile is taken all the same: `shardyard report {handle}`")
        raise
    if as_json:
        echo(json.dumps(to_json(profile, folder), indent=1))
        return
    print_table(HEADS, profile_rows(profile))
    echo(profile_words(profile))
    echo(f"traces: {folder}/rank-*.json.gz; https://ui.perfetto.dev opens them")
