"""`shardyard runs`: the runs in a folder and how they stand, with the jobs of launched ones."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.options import json_option, launchers_in, runs_dir_option
from shardyard.cli.tables import print_table
from shardyard.control.states import ask_all
from shardyard.errors import StorageError
from shardyard.launch.ledger import SIDE_DETAIL, Entry, Ledger
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import RunState, read_state
from shardyard.terminal import say, tell
from shardyard.units import format_seconds

_ASK_S = 1.0
"""How long launchers are asked for the states of jobs; the list is shown then as it is."""


@click.command()
@runs_dir_option
@json_option
@click.pass_context
def command(context: click.Context, runs_dir: Path, *, as_json: bool) -> None:
    """List the runs, the most recently changed last."""
    states = sorted(_read_all(runs_dir), key=lambda state: (state.updated_at or 0, state.id))
    jobs = _jobs(runs_dir, states)
    asked = [
        (RunDir((runs_dir / state.id).resolve()), jobs[state.id])
        for state in reversed(states)  # the newest first: those a reader looks for
        if state.id in jobs and state.state != "finished"
    ]
    told = ask_all(asked, launchers_in(context), within_s=_ASK_S)
    if as_json:
        rows = [{**asdict(state), "job": _job_json(state, jobs, told)} for state in states]
        tell(json.dumps(rows, indent=1))
        return
    if not states:
        say(f"no runs in {runs_dir}/")
        return
    _show(states, jobs, told)


def _show(states: Sequence[RunState], jobs: Mapping[str, Entry], told: Mapping[str, str]) -> None:
    now = time.time()
    columns: tuple[str, ...] = ("run", "state", "step", "loss", "changed")
    table: list[tuple[str, ...]] = [_row(state, now=now) for state in states]
    if jobs:
        columns = (*columns[:2], "job", *columns[2:])
        words = [_job_words(state, jobs, told) for state in states]
        table = [(*row[:2], word, *row[2:]) for row, word in zip(table, words, strict=True)]
    print_table(columns, table)


def _read_all(runs_dir: Path) -> list[RunState]:
    if not runs_dir.is_dir():
        return []
    folders = [folder for folder in runs_dir.iterdir() if (folder / "recipe.yaml").is_file()]
    return [read_state(RunDir(folder)) for folder in folders]


def _jobs(runs_dir: Path, states: Sequence[RunState]) -> dict[str, Entry]:
    """Run id -> its newest job, of those that were launched; a side job where it has no other."""
    found = {}
    for state in states:
        try:
            ledger = Ledger(RunDir(runs_dir / state.id).ledger)
            jobs = ledger.jobs() or ledger.side_jobs()
        except StorageError as error:  # does not keep the others from being shown
            say(f"warning: {error}")
            continue
        if jobs:
            found[state.id] = jobs[-1]
    return found


def _job_words(state: RunState, jobs: Mapping[str, Entry], told: Mapping[str, str]) -> str:
    if state.id not in jobs:
        return ""
    word = "over" if state.state == "finished" else told.get(state.id, "not told in time")
    job = jobs[state.id]
    kind = job.details.get(SIDE_DETAIL, "").partition("-")[0]
    return f"{job.launcher}: {f'{kind} ' if kind else ''}{word}"


def _job_json(
    state: RunState, jobs: Mapping[str, Entry], told: Mapping[str, str]
) -> dict[str, str | None] | None:
    if state.id not in jobs:
        return None
    job = jobs[state.id]
    side = {"side": job.details[SIDE_DETAIL]} if SIDE_DETAIL in job.details else {}
    return {"launcher": job.launcher, "id": job.id, "state": told.get(state.id), **side}


def _row(state: RunState, *, now: float) -> tuple[str, str, str, str, str]:
    return (
        state.id,
        state.state,
        "" if state.step is None else f"{state.step:,}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.updated_at is None else f"{format_seconds(now - state.updated_at)} ago",
    )
