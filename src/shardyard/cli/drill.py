"""`shardyard drill`: breaks short runs of a recipe here, and tables what became of them."""

import json
import signal
from pathlib import Path
from types import FrameType

import click

from shardyard.cli.completion import by, faults
from shardyard.cli.options import json_option, recipe_argument
from shardyard.drill.case import DrillWorkspace
from shardyard.drill.faults import FAULTS
from shardyard.drill.page import faults_table, render_drill
from shardyard.drill.recipe import LEAST_STEPS, read_drill_recipe
from shardyard.drill.run import (
    Drill,
    FaultSelection,
    default_folder,
    run_drill,
    select_faults,
)
from shardyard.drill.sandbox import enter_namespaces
from shardyard.io.files import write_json, write_text
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err, print_table
from shardyard.report.terminal import show


def _reject_kill_loop(_ctx: click.Context, option: click.Parameter, given: str | None) -> None:
    if given is not None:
        raise click.UsageError(
            f"{option.opts[0]}: a drill no longer kills ranks in a loop. Use `--faults sigkill "
            "--repeat 20`: it kills a rank in each of 20 runs and checks each. In a checkout of "
            "Shardyard, `python -m benchmarks.killed_run` measures the share of time that trains."
        )


@click.command()
@recipe_argument
@click.option(
    "--faults",
    "names",
    metavar="LIST",
    shell_complete=by(faults),
    help="Failures to inject, joined by commas. Default: all that are possible here.",
)
@click.option("--repeat", type=click.IntRange(1, 1000), default=1, show_default=True,
              help="Times to inject each failure, at other moments and targets.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Random seed of moments and targets.")  # fmt: skip
@click.option("--steps", type=click.IntRange(LEAST_STEPS, 100_000), default=200, show_default=True,
              help="Optimizer steps of each run.")  # fmt: skip
@click.option("--patience", "patience_s", type=click.FloatRange(1, 3600), default=60.0,
              show_default=True, help="Seconds without a step or event before a run is "
              "stopped.")  # fmt: skip
@click.option("--mtbf", hidden=True, callback=_reject_kill_loop, expose_value=False)
@click.option("--for", hidden=True, callback=_reject_kill_loop, expose_value=False)
@click.option("--dir", "folder", type=LocalPath(path_type=Path, file_okay=False),
              help="Output folder. Default: drills/<recipe>-<date>.")  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="List the failures that would be injected, without a run."
)
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
    """Inject failures into short runs of RECIPE, and check that they recover.

    Works only on this machine, in a folder of its own. It ends only processes that it started.
    """
    drilled = read_drill_recipe(recipe, steps=steps)
    asked = select_faults(names, drilled, repeat=repeat)
    if dry_run:
        _list(asked, as_json=as_json)
        return 0
    place = DrillWorkspace(
        folder=(folder or default_folder(recipe)).resolve(), patience_s=patience_s
    )
    place.check_unused()
    if why := enter_namespaces():
        echo_err(f"not in namespaces of its own, so /dev/shm is not looked at: {why}")
        asked = asked.outside(why)
    signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)
    drill = run_drill(drilled, place, asked, seed=seed, on_case=_write)
    if as_json:
        echo(json.dumps({**drill.to_json(), "page": str(drill.page_file)}, indent=1))
    else:
        _show(drill)
    return 0 if drill.is_good else 1


def _write(drill: Drill) -> None:
    write_json(drill.result_file, drill.to_json())
    write_text(drill.page_file, render_drill(drill))


def _raise_keyboard_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _list(selection: FaultSelection, *, as_json: bool) -> None:
    if as_json:
        echo(
            json.dumps({"possible": selection.names, "impossible": selection.impossible}, indent=1)
        )
        return
    rows: list[tuple[str, str, str]] = []
    for name in selection.names:
        fault = FAULTS[name]
        rows.append((name, fault.acts_on, f"{fault.what}: {fault.method}"))
    rows += [(name, "-", f"not possible here: {why}") for name, why in selection.impossible.items()]
    print_table(("fault", "acts on", "what"), rows)


def _show(drill: Drill) -> None:
    show([faults_table(drill)])
    for case in drill.cases:
        if not case.result.is_good:
            echo_err(
                f"{case.observations.fault} {case.observations.number}: "
                f"{'; '.join(case.result.problems)}"
            )
    for name, why in drill.impossible.items():
        echo_err(f"{name}: not possible here: {why}")
    echo()
    echo(f"page: {drill.page_file}")
    echo(f"raw result: {drill.result_file}")
