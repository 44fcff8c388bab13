"""Options that several verbs share, so that they are spelled and explained once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shardyard.cli.completion import by, runs


class LocalPath(click.Path):
    """A path of this machine, held to what paths among the settings are held to.

    Without it a URL is the name of a local folder, and what was written there is looked for in vain
    where it was asked to be.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        # `--help` waits for no schema
        from shardyard.config.credentials import show, without_secrets
        from shardyard.config.reach import why_not_reached
        from shardyard.config.text_problems import why_no_path

        text = os.fspath(value)
        why = why_no_path(text) or why_not_reached(text)
        if why is not None:
            self.fail(f"{show(without_secrets(text))} {why}", param, ctx)
        return super().convert(Path(text).expanduser() if text[:1] == "~" else text, param, ctx)


run_argument = click.argument("run", type=LocalPath(), shell_complete=by(runs))
"""A path, an id or the beginning of one."""

runs_dir_option = click.option(
    "--runs-dir",
    type=LocalPath(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds the runs (run.dir).",
)
trust_option = click.option(
    "--trust-folder",
    "trusts_folder",
    is_flag=True,
    help="Also if others may write into the run's folder, and so decide what is ended or started.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")

side_option = click.option(
    "--side",
    "is_side",
    is_flag=True,
    help="The newest side job (prepare, export, fetch, probe), not the training.",
)

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
