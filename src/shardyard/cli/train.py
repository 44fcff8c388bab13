"""`shardyard train`: makes a run folder and trains here, in processes of their own."""

import json
import os
from pathlib import Path

import click

from shardyard.cli.options import json_option, recipe_argument
from shardyard.cli.train_here import run_attempt
from shardyard.config.compatibility import check_packages, engines_for
from shardyard.config.load import dump_recipe
from shardyard.control.attempt import Attempt, no_plan, refuse_other_nodes, resolve_here
from shardyard.control.request import Request
from shardyard.errors import RequestError, StorageError
from shardyard.files import write_text
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.rundir.lines import EventWriter
from shardyard.terminal import say, tell


@click.command()
@recipe_argument
@click.option("--dry-run", is_flag=True, help="Prepare the data, print the plan, start nothing.")
@json_option
def command(recipe: tuple[str, ...], *, dry_run: bool, as_json: bool) -> int:
    """Train RECIPE (files and section.key=value overrides) on this machine."""
    request = Request.read(recipe, runs_here=True)
    _refuse_existing(request)
    _refuse_unwritable(Path(request.recipe.run.dir).expanduser())
    refuse_other_nodes(request.recipe)
    for warning in check_packages(engines_for(request.recipe)):
        say(f"warning: {warning}")
    machine, resolved = resolve_here(request)
    run = request.recipe.run
    run_id = run.id or new_run_id(str(resolved.recipe.run.name))
    attempt = Attempt(
        run_dir=RunDir(Path(run.dir).expanduser().resolve() / run_id),
        number=0,
        asked=request.recipe,
        resolved=resolved,
        machine=machine,
    )
    if dry_run:
        prediction = attempt.plan()
        content = json.dumps(None if prediction is None else prediction.to_json(), indent=1)
        line = no_plan() if prediction is None else prediction.line()
        tell(content if as_json else line)
        return 0
    write_text(attempt.run_dir.recipe, dump_recipe(request.recipe))
    events = EventWriter(attempt.run_dir.events, attempt=0, generation=0)
    events.write("run_started", run=run_id)
    events.close()
    return run_attempt(attempt, as_json=as_json)


def _refuse_existing(request: Request) -> None:
    run = request.recipe.run
    if run.id is None:
        return
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / run.id)
    if run_dir.recipe.exists():
        raise RequestError(
            f"run.id={run.id!r} exists already in {run.dir}. A second run in its folder would mix "
            f"their files. Continue it with `shardyard resume {run_dir.handle}`, or choose another "
            "id."
        )


def _refuse_unwritable(runs_dir: Path) -> None:
    """Raise now, not after an hour of preparation, if no run folder can be made there."""
    nearest = next(place for place in (runs_dir, *runs_dir.absolute().parents) if place.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    why = "cannot be written" if nearest.is_dir() else "is a file, not a folder"
    raise StorageError(
        f"run.dir={str(runs_dir)!r}: {nearest} {why}. Every run gets a folder there. Mend that, or "
        "choose another with run.dir."
    )
