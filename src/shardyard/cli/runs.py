"""`shardyard runs`: the runs in a folder and how they stand, with the jobs of launched ones."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from shardyard.cli.options import json_option, launchers_in, runs_dir_option
from shardyard.cli.tables import print_table
from shardyard.control.runs import Run, runs
from shardyard.launchers.ledger import SIDE_DETAIL
from shardyard.rundir.state import RunState
from shardyard.terminal import say, tell
from shardyard.units import format_seconds


@click.command()
@runs_dir_option
@json_option
@click.pass_context
def command(context: click.Context, runs_dir: Path, *, as_json: bool) -> None:
    """List the runs, the most recently changed last."""
    found = runs(runs_dir, launchers=launchers_in(context))
    if as_json:
        tell(json.dumps([run.to_json() for run in found], indent=1))
        return
    if not found:
        say(f"no runs in {runs_dir}/")
        return
    _show(found)


def _show(found: Sequence[Run]) -> None:
    now = time.time()
    columns: tuple[str, ...] = ("run", "state", "step", "loss", "changed")
    table: list[tuple[str, ...]] = [_row(run.state, now=now) for run in found]
    if any(run.entry is not None for run in found):
        columns = (*columns[:2], "job", *columns[2:])
        rows = zip(table, found, strict=True)
        table = [(*row[:2], _job_words(run), *row[2:]) for row, run in rows]
    print_table(columns, table)


def _job_words(run: Run) -> str:
    if run.entry is None:
        return ""
    word = "over" if run.state.state == "finished" else run.job_state or "not told in time"
    kind = run.entry.details.get(SIDE_DETAIL, "").partition("-")[0]
    return f"{run.entry.launcher}: {f'{kind} ' if kind else ''}{word}"


def _row(state: RunState, *, now: float) -> tuple[str, str, str, str, str]:
    return (
        state.id,
        state.state,
        "" if state.step is None else f"{state.step:,}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.updated_at is None else f"{format_seconds(now - state.updated_at)} ago",
    )
