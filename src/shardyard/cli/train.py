"""`shardyard train`: makes a run folder and trains here, in processes of their own."""

import json

import click

from shardyard.cli.options import json_option, recipe_argument
from shardyard.cli.run_attempt import run_attempt
from shardyard.control.attempt import no_plan
from shardyard.control.request import Request
from shardyard.control.train import begin, first_attempt
from shardyard.io.terminal import echo


@click.command()
@recipe_argument
@click.option(
    "--dry-run", is_flag=True, help="Prepare the data and print the plan; start no training."
)
@click.option(
    "--force", "is_forced", is_flag=True, help="Start even if the plan says it does not fit."
)
@json_option
def command(recipe: tuple[str, ...], *, dry_run: bool, is_forced: bool, as_json: bool) -> int:
    """Train RECIPE (files and section.key=value overrides) on this machine."""
    request = Request.read(recipe, runs_here=True)
    attempt = first_attempt(request, is_forced=is_forced or dry_run)
    if dry_run:
        prediction = attempt.plan()
        content = json.dumps(None if prediction is None else prediction.to_json(), indent=1)
        line = no_plan() if prediction is None else prediction.line()
        echo(content if as_json else line)
        return 0
    return run_attempt(begin(attempt), as_json=as_json)
