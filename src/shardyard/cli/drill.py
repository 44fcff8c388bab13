"""`shardyard drill`: breaks short runs of a recipe here, and tables what became of them."""

import json
import signal
from pathlib import Path
from types import FrameType

import click

from shardyard.cli.completion import by, faults
from shardyard.cli.options import json_option, recipe_argument
from shardyard.cli.tables import print_table
from shardyard.drill.apart import enter
from shardyard.drill.case import Place
from shardyard.drill.faults import FAULTS
from shardyard.drill.page import render_drill
from shardyard.drill.recipe import LEAST_STEPS, read_drilled
from shardyard.drill.run import Chosen, Drill, Row, chosen, default_folder, run_drill
from shardyard.files import write_text
from shardyard.local_path import LocalPath
from shardyard.terminal import say, tell


@click.command()
@recipe_argument
@click.option(
    "--faults",
    "names",
    metavar="LIST",
    shell_complete=by(faults),
    help="Faults to try, joined by commas; default: all that are possible here.",
)
@click.option("--repeat", type=click.IntRange(1, 1000), default=1, show_default=True,
              help="Times each fault is tried, at other moments and on other targets.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Of moments and targets.")  # fmt: skip
@click.option("--steps", type=click.IntRange(LEAST_STEPS, 100_000), default=200, show_default=True,
              help="Length of each run.")  # fmt: skip
@click.option("--patience", "patience_s", type=click.FloatRange(1, 3600), default=60.0,
              show_default=True, help="Seconds without a step or an event after which a run "
              "is ended.")  # fmt: skip
@click.option("--dir", "folder", type=LocalPath(path_type=Path, file_okay=False),
              help="Folder of the drill; default: drills/<recipe>-<date>.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="List the faults that would be tried; start nothing.")
@json_option
def command(
    recipe: tuple[str, ...],
    *,
    names: str | None,
    repeat: int,
    seed: int,
    steps: int,
    patience_s: float,
    folder: Path | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Break short runs of RECIPE (files and section.key=value overrides) in every way there is.

    Runs on this machine alone, in a folder of its own, and ends only what it has started.
    """
    drilled = read_drilled(recipe, steps=steps)
    asked = chosen(names, drilled, repeat=repeat)
    if dry_run:
        _list(asked, as_json=as_json)
        return 0
    if why := enter():
        say(f"not in namespaces of its own, so /dev/shm is not looked at: {why}")
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    place = Place(folder=(folder or default_folder(recipe)).resolve(), patience_s=patience_s)
    drill = run_drill(drilled, place, asked, seed=seed)
    page = place.folder / "drill.html"
    write_text(page, render_drill(drill))
    if as_json:
        tell(json.dumps({**drill.to_json(), "page": str(page)}, indent=1))
    else:
        _show(drill, page)
    return 0 if drill.is_good else 1


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _list(asked: Chosen, *, as_json: bool) -> None:
    if as_json:
        tell(json.dumps({"possible": asked.names, "impossible": asked.impossible}, indent=1))
        return
    rows: list[tuple[str, str, str]] = []
    for name in asked.names:
        fault = FAULTS[name]
        rows.append((name, fault.acts_on, f"{fault.what}: {fault.how}"))
    rows += [(name, "-", f"not possible here: {why}") for name, why in asked.impossible.items()]
    print_table(("fault", "acts on", "what"), rows)


def _show(drill: Drill, page: Path) -> None:
    columns = ("fault", "noticed", "after", "cause right", "steps lost", "next step", "equal",
               "left over")  # fmt: skip
    print_table(columns, [_row(row) for row in drill.rows])
    for case in drill.cases:
        if not case.verdict.is_good:
            say(f"{case.facts.fault} {case.facts.number}: {'; '.join(case.verdict.problems)}")
    for name, why in drill.impossible.items():
        say(f"{name}: not possible here: {why}")
    tell()
    tell(f"page: {page}")
    tell(f"raw result: {drill.result_file}")


def _row(row: Row) -> tuple[str, ...]:
    total, is_due = len(row.cases), FAULTS[row.fault].named is not None
    left = sorted({case.verdict.left for case in row.cases} - {""})
    return (
        row.fault,
        f"{row.count('is_noticed')} of {total}" if is_due else "-",
        _seconds(row.median("noticed_s")) if is_due else "-",
        f"{row.count('is_cause_right')} of {total}" if is_due else "-",
        f"{row.median('steps_lost'):g}",
        _seconds(row.median("next_step_s")),
        f"{row.exact('equal')} of {total}",
        "; ".join(left) or "nothing",
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
