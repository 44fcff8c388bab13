"""`shardyard study`: one recipe on several numbers of nodes, as one table and one page."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from shardyard.cli.completion import by, launchers
from shardyard.cli.options import (
    any_recipe_argument,
    json_option,
    launchers_in,
    runs_dir_option,
)
from shardyard.errors import RequestError
from shardyard.io.files import read_json_object
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err

if TYPE_CHECKING:
    from shardyard.control.study import StudyOptions
    from shardyard.control.study_runs import Runs
    from shardyard.report.study.rows import ScalingSeries


class _Sizes(click.ParamType[tuple[int, ...]]):
    """Numbers of nodes, joined by commas."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not a list of numbers of nodes such as 1,2,4", param, ctx)
        sizes = tuple(int(word) for word in words)
        if len(set(sizes)) < len(sizes):
            self.fail(f"{value!r} names a size twice", param, ctx)
        return sizes


@click.command()
@any_recipe_argument
@click.option(
    "--nodes",
    type=_Sizes(),
    help="Numbers of nodes, such as 1,2,4,8; without --on, of CPU processes.",
)
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launchers),
    help="Run each size with this launcher.",
)
@click.option("--predict", "is_predicted", is_flag=True, help="Plan each size, without running it.")
@click.option(
    "--hold",
    type=click.Choice(["batch-per-device", "global-batch"]),
    help="Batch to keep constant: weak or strong scaling. Default: the one the recipe sets.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=10),
    default=60,
    show_default=True,
    help="Steps of each size.",
)
@click.option(
    "--extrapolate",
    "extrapolated",
    type=_Sizes(),
    default=(),
    help="Larger sizes to extrapolate to, with an uncertainty band.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    type=LocalPath(path_type=Path),
    help="Published table as CSV, instead of a recipe or to compare with --predict; repeatable.",
)
@click.option(
    "--max-usd",
    type=click.FloatRange(min=0, min_open=True),
    help="Cost limit in dollars for all sizes together.",
)
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the jobs that would be submitted, without submitting them.",
)
@runs_dir_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    recipe: tuple[str, ...],
    *,
    nodes: tuple[int, ...] | None,
    on: str | None,
    is_predicted: bool,
    hold: Literal["batch-per-device", "global-batch"] | None,
    steps: int,
    extrapolated: tuple[int, ...],
    tables: tuple[Path, ...],
    max_usd: float | None,
    is_yes: bool,
    dry_run: bool,
    runs_dir: Path,
    as_json: bool,
) -> int:
    """Measure how RECIPE scales: the same recipe on several numbers of nodes.

    Plans and runs each size in turn. Repeat an interrupted command to continue; finished sizes do
    not run again. Writes table.md, table.csv, table.json and study.html to a folder below run.dir.
    """
    _check_option_conflicts(recipe, nodes, on=on, is_predicted=is_predicted, tables=tables)
    is_placed = context.get_parameter_source("runs_dir") != ParameterSource.DEFAULT
    if recipe and is_placed:
        raise click.UsageError("--runs-dir is only for tables; a recipe says it by run.dir.")
    if tables and not recipe:
        return _published(tables, runs_dir, as_json=as_json)
    from shardyard.control.study import StudyOptions  # not above: `--help` waits for no schema

    assert nodes is not None  # refused above
    asked = StudyOptions(sizes=nodes, extrapolated=extrapolated, hold=hold, steps=steps)
    if is_predicted:
        if max_usd is not None or dry_run:
            raise click.UsageError("--predict starts no job: leave --max-usd and --dry-run out.")
        return _predicted(recipe, asked, tables, as_json=as_json)
    assert on is not None
    return _run(
        context, recipe, asked, on=on, max_usd=max_usd, is_yes=is_yes, dry_run=dry_run,
        as_json=as_json,
    )  # fmt: skip


def _check_option_conflicts(
    recipe: tuple[str, ...],
    nodes: tuple[int, ...] | None,
    *,
    on: str | None,
    is_predicted: bool,
    tables: tuple[Path, ...],
) -> None:
    """Options that say two things at once, or too little."""
    if not recipe and not tables:
        raise click.UsageError("give RECIPE and --nodes, or a published table with --table.")
    if tables and (on is not None or (recipe and not is_predicted)):
        raise click.UsageError(
            "--table is a published study: give it by itself, or with RECIPE and --predict to "
            "compare the plan with it."
        )
    if tables and not recipe:
        if nodes is not None or is_predicted:
            raise click.UsageError("--nodes and --predict are of a RECIPE: give one.")
        return
    if nodes is None:
        raise click.UsageError("--nodes is missing: the sizes, such as --nodes 1,2,4,8.")
    if (on is None) == (not is_predicted):
        raise click.UsageError("give --on LAUNCHER to run each size, or --predict to plan it.")
    if len(tables) > 1:
        raise click.UsageError("a plan is compared with one published table: give one --table.")


def _published(tables: tuple[Path, ...], runs_dir: Path, *, as_json: bool) -> int:
    from shardyard.report.study.published import read_table

    series = [read_table(path) for path in tables]
    names = [each.name for each in series]
    if len(set(names)) < len(names):
        raise RequestError(
            "--table: two files have one name, and a series is named after its file. Rename one."
        )
    name = "-".join(names)
    return _write(runs_dir.resolve() / f"study-{name}", name, series, [], as_json=as_json)


def _predicted(
    recipe: tuple[str, ...], options: "StudyOptions", tables: tuple[Path, ...], *, as_json: bool
) -> int:
    from shardyard.control.study_phases import studies_of
    from shardyard.report.study.published import read_table

    studies = studies_of(recipe, options, None)
    series = studies.predicted(read_table(tables[0]) if tables else None)
    notes = ["Predicted; no job was run."]
    if len(studies.each) > 1:
        notes.append("Each phase has its own table: their steps differ.")
    return _write(studies.folder, studies.id, series, notes, as_json=as_json)


def _run(
    context: click.Context,
    recipe: tuple[str, ...],
    options: "StudyOptions",
    *,
    on: str,
    max_usd: float | None,
    is_yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    from shardyard.cli.confirm import confirm, print_requests
    from shardyard.control.study_phases import studies_of
    from shardyard.control.study_runs import describe, plan_runs, proposals, run_sizes
    from shardyard.control.submission import launcher_named

    known = launchers_in(context)
    launcher = launcher_named(on, known)
    each: list[Runs] = []
    left = max_usd
    for study in studies_of(recipe, options, launcher).each:
        runs = plan_runs(study, launcher, known, max_usd=left, is_dry_run=dry_run)
        each.append(runs)
        if left is not None:
            left = max(0.0, left - runs.spent_usd() - (runs.open_usd or 0.0))
        echo_err(
            f"study: {study.id} on {launcher.name}, {study.hold} held at {study.batch:,} samples"
        )
        for line in describe(runs):
            echo_err(line)
    if dry_run:
        print_requests([one for runs in each for one in proposals(runs)], as_json=as_json)
        return 0
    if count := sum(len(runs.open) for runs in each):
        confirm(f"run {count} sizes, one after the other?", is_yes=is_yes)
    for runs in each:
        if max_usd is not None:
            runs.max_usd = max_usd - sum(one.spent_usd() for one in each if one is not runs)
        run_sizes(runs)
    _answer(*(runs.study.folder for runs in each), as_json=as_json)
    return 1 if any(runs.failed for runs in each) else 0


def _write(
    folder: Path, name: str, series: "list[ScalingSeries]", notes: list[str], *, as_json: bool
) -> int:
    from shardyard.report.study.page import write_study

    write_study(folder, name, series, notes)
    _answer(folder, as_json=as_json)
    return 0


def _answer(*folders: Path, as_json: bool) -> None:
    """The table of each folder and where its page is."""
    from shardyard.report.study.page import JSON, MARKDOWN, PAGE

    if as_json:
        contents = [
            {**read_json_object(folder / JSON), "folder": str(folder)} for folder in folders
        ]
        echo(json.dumps(contents[0] if len(contents) == 1 else contents, indent=1))
        return
    for folder in folders:
        echo((folder / MARKDOWN).read_text(encoding="utf-8"))
        echo_err(f"wrote {folder / PAGE}")
