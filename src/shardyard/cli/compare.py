"""`shardyard compare`: runs side by side, in the terminal and on a page."""

import json
import os
from pathlib import Path

import click

from shardyard.cli.completion import by, runs
from shardyard.cli.options import json_option, runs_dir_option
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err
from shardyard.report.compare.page import (
    excluded_steps_text,
    terminal_blocks,
    write_comparison,
)
from shardyard.report.compare.targets import parse_target
from shardyard.report.terminal import show
from shardyard.rundir.layout import find_run

PAGE = "compare.html"
"""File next to the folder of the first run."""


@click.command()
@click.argument(
    "sides",
    metavar="RUN RUN...",
    nargs=-1,
    required=True,
    callback=lambda context, param, words: [_names(word, param, context) for word in words],
    shell_complete=by(runs),
)
@click.option(
    "--target",
    "targets",
    metavar="METRIC=VALUE",
    multiple=True,
    help="Report when and at what cost each run reached it. Default: each run's run.target.",
)
@click.option(
    "--page",
    type=LocalPath(path_type=Path, dir_okay=False),
    help=f"Page to write. Default: {PAGE} next to the first run.",
)
@runs_dir_option
@json_option
def command(
    sides: list[list[str]],
    *,
    targets: tuple[str, ...],
    page: Path | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Compare runs (each a path, id or its beginning) with the first one.

    Join repeats of one configuration by commas: A1,A2,A3 B1,B2,B3. Running and failed runs can be
    compared too; only run folders are read.
    """
    found = [[find_run(run, runs_dir) for run in side] for side in sides]
    path = page or found[0][0].path.parent / PAGE
    asked = dict(parse_target(text) for text in targets)
    comparison = write_comparison(found, path, target=asked)
    if as_json:
        echo(json.dumps({**comparison.to_json(), "page": str(path)}, indent=1))
        return
    first, *rest = terminal_blocks(comparison)
    show(first.blocks, title=first.title)
    show(rest)
    echo_err(excluded_steps_text(comparison))
    echo_err("the page with the curves:")
    echo(path)


def _names(word: str, param: click.Parameter, context: click.Context) -> list[str]:
    """The runs that one word names; a path may hold a comma."""
    is_path = os.path.exists(word)  # noqa: PTH110 (many names are longer than a path may be)
    names = [word] if is_path else word.split(",")
    return [LocalPath().convert(name, param, context) for name in names]
