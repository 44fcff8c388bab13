"""Options that several verbs share, so that they are spelled and explained once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds the runs (run.dir).",
)
trust_option = click.option(
    "--trust-folder",
    "trusts_folder",
    is_flag=True,
    help="Also if others may write into the run's folder, and so decide what is ended.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")

raw_option = click.option(
    "--raw", "is_raw", is_flag=True, help="Print control characters as they come."
)


def as_override(max_usd: float | None) -> tuple[str, ...]:
    """``--max-usd`` as the setting that it stands for, so that it reaches the nodes."""
    return () if max_usd is None else (f"launch.max_usd={max_usd!r}",)


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the verbs that submit."""
    options = (
        click.option("--yes", "is_yes", is_flag=True, help="Do not ask."),
        click.option(
            "--force",
            "is_forced",
            is_flag=True,
            help="Also what the plan or the price speaks against.",
        ),
        click.option(
            "--max-usd",
            type=click.FloatRange(min=0, min_open=True),
            help="The most it may cost: launch.max_usd.",
        ),
        click.option(
            "--follow/--detach",
            "is_followed",
            default=False,
            show_default=True,
            help="Follow the job until its end, or leave it.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
