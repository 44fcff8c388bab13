"""Options that several verbs share, so that they are spelled and explained once."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardyard.cli.completion import by, overrides, recipe, runs
from shardyard.io.path_option import LocalPath

if TYPE_CHECKING:
    from shardyard.control.submission import Launchers  # `--help` waits for no schema

run_argument = click.argument("run", type=LocalPath(), shell_complete=by(runs))
"""A path, an id or the beginning of one."""

recipe_argument = click.argument("recipe", nargs=-1, required=True, shell_complete=by(recipe))
"""Recipe files and ``section.key=value`` overrides."""
any_recipe_argument = click.argument("recipe", nargs=-1, shell_complete=by(recipe))
"""The same, where it may be left out."""
overrides_argument = click.argument("overrides", nargs=-1, shell_complete=by(overrides))

runs_dir_option = click.option(
    "--runs-dir",
    type=LocalPath(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Parent folder of the runs (run.dir).",
)
trust_option = click.option(
    "--trust-folder",
    "trusts_folder",
    is_flag=True,
    help="Continue although other users can write to the run folder, and so change what runs.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

side_option = click.option(
    "--side",
    "is_side",
    is_flag=True,
    help="Act on the newest side job (prepare, export, fetch, probe), not on the training.",
)

raw_option = click.option(
    "--raw", "is_raw", is_flag=True, help="Print control characters unescaped."
)


def as_override(max_usd: float | None) -> tuple[str, ...]:
    """Return the setting for ``--max-usd``, so that it reaches the nodes."""
    return () if max_usd is None else (f"launch.max_usd={max_usd!r}",)


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the verbs that submit."""
    options = (
        click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation."),
        click.option(
            "--force",
            "is_forced",
            is_flag=True,
            help="Submit even if the plan says it does not fit or exceeds the price limit.",
        ),
        click.option(
            "--max-usd",
            type=click.FloatRange(min=0, min_open=True),
            help="Cost limit in dollars: sets launch.max_usd.",
        ),
        click.option(
            "--follow/--detach",
            "is_followed",
            default=False,
            show_default=True,
            help="Follow the job until it ends, or return after submitting.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def launchers_in(context: click.Context) -> "Launchers | None":
    """The launchers that the command line was given; None: all that there are."""
    found = context.find_root().obj
    return found if found else None
