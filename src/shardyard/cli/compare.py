"""`shardyard compare`: runs side by side, in the terminal and on a page."""

import json
import os
from pathlib import Path

import click

from shardyard.cli.completion import by, runs
from shardyard.cli.options import json_option, runs_dir_option
from shardyard.cli.tables import print_table
from shardyard.errors import RequestError
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err
from shardyard.report.compare.comparison import RunComparison
from shardyard.report.compare.page import (
    Table,
    environment_table,
    excluded_steps_text,
    runs_table,
    settings_table,
    speeds_table,
    targets_table,
    write_comparison,
)
from shardyard.report.compare.targets import parse_target
from shardyard.report.study.compare import is_study, read_study
from shardyard.report.study.compare_page import method_notes, sizes_table, write_study_comparison
from shardyard.report.study.compare_page import settings_table as study_settings_table
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
    help="When and for how much each run reached it; default: their own run.target.",
)
@click.option(
    "--page",
    type=LocalPath(path_type=Path, dir_okay=False),
    help=f"Write the page here; default: {PAGE} in the folder of the first run's folder.",
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
    """Compare runs (each a path, an id, or its beginning) with the first of them; or studies.

    Repeats of one kind are joined by commas and are one side: A1,A2,A3 B1,B2,B3. Only their folders
    are read; a run that continues or has failed can be compared too. Studies, named by their whole
    name or path, are compared size by size.
    """
    studies = [[_study(word, runs_dir) for word in side] for side in sides]
    if any(study is not None for side in studies for study in side):
        _compare_studies(sides, studies, targets=targets, page=page, as_json=as_json)
        return
    found = [[find_run(run, runs_dir) for run in side] for side in sides]
    path = page or found[0][0].path.parent / PAGE
    asked = dict(parse_target(text) for text in targets)
    comparison = write_comparison(found, path, target=asked)
    if as_json:
        echo(json.dumps({**comparison.to_json(), "page": str(path)}, indent=1))
        return
    _show(comparison)
    echo_err("the page with the curves:")
    echo(path)


def _names(word: str, param: click.Parameter, context: click.Context) -> list[str]:
    """The runs that one word names; a path may hold a comma."""
    is_path = os.path.exists(word)  # noqa: PTH110 (many names are longer than a path may be)
    names = [word] if is_path else word.split(",")
    return [LocalPath().convert(name, param, context) for name in names]


def _study(word: str, runs_dir: Path) -> Path | None:
    """The folder of the study that a word names; None: it names none."""
    named = [folder for folder in (Path(word), runs_dir / word) if is_study(folder)]
    return named[0] if named else None


def _compare_studies(
    sides: list[list[str]],
    studies: list[list[Path | None]],
    *,
    targets: tuple[str, ...],
    page: Path | None,
    as_json: bool,
) -> None:
    others = [
        word
        for words, folders in zip(sides, studies, strict=True)
        for word, folder in zip(words, folders, strict=True)
        if folder is None
    ]
    if others:
        raise RequestError(
            f"{', '.join(others)}: no study of this name is there, and the others are studies. "
            "Compare studies with studies, by their whole names, or runs with runs."
        )
    if targets:
        raise RequestError(
            "--target is for runs: the sizes of a study train too few steps to reach one. Leave "
            "it out."
        )
    tables = [[read_study(folder) for folder in side if folder is not None] for side in studies]
    path = page or tables[0][0].folder.parent / PAGE
    beside = write_study_comparison(tables, path)
    if as_json:
        echo(json.dumps({**beside.to_json(), "page": str(path)}, indent=1))
        return
    _print("sizes, beside the first study", sizes_table(beside))
    _print("settings that differ", study_settings_table(beside))
    for text in method_notes(beside):
        echo_err(text)
    echo_err("the page with the curves:")
    echo(path)


def _show(comparison: RunComparison) -> None:
    for title, table in (
        ("runs", runs_table(comparison)),
        ("speed, beside the first", speeds_table(comparison)),
        ("time and cost to a target", targets_table(comparison)),
        ("settings that differ", settings_table(comparison)),
        ("around them", environment_table(comparison)),
    ):
        _print(title, table)
    echo_err(excluded_steps_text(comparison))


def _print(title: str, table: Table) -> None:
    heads, rows = table
    if rows:
        print_table([head.removeprefix("#") for head in heads], rows, title=title)
