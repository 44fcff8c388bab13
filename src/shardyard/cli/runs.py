"""`shardyard runs`: the runs in a folder and their states, with the jobs of launched ones."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.completion import by
from shardyard.cli.completion import launchers as launcher_names
from shardyard.cli.options import (
    json_option,
    launchers_in,
    overrides_argument,
    runs_dir_option,
)
from shardyard.control.runs import ListedRun, list_runs, strays
from shardyard.control.submission import launcher_named
from shardyard.io.terminal import echo, echo_err, print_table
from shardyard.launchers.base import SchedulerJob
from shardyard.launchers.ledger import SIDE_DETAIL
from shardyard.rundir.state import RunState
from shardyard.units import format_age


@click.command()
@overrides_argument
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launcher_names),
    help="Also list this launcher's Shardyard jobs without a run folder here.",
)
@runs_dir_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    overrides: tuple[str, ...],
    runs_dir: Path,
    *,
    on: str | None,
    as_json: bool,
) -> None:
    """List runs, the most recently changed last.

    With --on, OVERRIDES such as launch.kubernetes.context=NAME set where to look for jobs.
    """
    launchers = launchers_in(context)
    if on is None and overrides:
        raise click.UsageError("settings say where --on looks, and --on is not given.")
    lost = None
    if on is not None:
        lost = strays(launcher_named(on, launchers), overrides, runs_dir)
    found = list_runs(runs_dir, launchers=launchers)
    if as_json:
        rows = [run.to_json() for run in found]
        content = rows if lost is None else {"runs": rows, "strays": [asdict(job) for job in lost]}
        echo(json.dumps(content, indent=1))
        return
    if not found:
        echo_err(f"no runs in {runs_dir}/")
    else:
        _show(found)
    if lost is not None:
        _show_strays(lost, on=str(on), runs_dir=runs_dir)


def _show_strays(lost: Sequence[SchedulerJob], *, on: str, runs_dir: Path) -> None:
    if not lost:
        echo_err(f"{on} has no job of ours that no run in {runs_dir}/ knows")
        return
    echo(f"jobs of ours on {on} that no run in {runs_dir}/ knows, and that may cost money:")
    rows = [(job.run_id, job.id, job.state.value, job.where, job.end) for job in lost]
    print_table(("run", "job", "state", "where", "ends with"), rows)
    echo_err("where a run's folder was moved, --runs-dir takes the one that it is in now")


def _show(listing: Sequence[ListedRun]) -> None:
    now = time.time()
    columns: tuple[str, ...] = ("run", "state", "step", "loss", "changed")
    table: list[tuple[str, ...]] = [_row(run.state, now=now) for run in listing]
    if any(run.entry is not None for run in listing):
        columns = (*columns[:2], "job", *columns[2:])
        rows = zip(table, listing, strict=True)
        table = [(*row[:2], _job_words(run), *row[2:]) for row, run in rows]
    print_table(columns, table)


def _job_words(run: ListedRun) -> str:
    if run.entry is None:
        return ""
    word = "over" if run.state.state == "finished" else run.job_state or "no answer in time"
    kind = run.entry.details.get(SIDE_DETAIL, "").partition("-")[0]
    return f"{run.entry.launcher}: {f'{kind} ' if kind else ''}{word}"


def _row(state: RunState, *, now: float) -> tuple[str, str, str, str, str]:
    return (
        state.id,
        state.state,
        "" if state.step is None else f"{state.step:,}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.updated_at is None else format_age(now - state.updated_at),
    )
