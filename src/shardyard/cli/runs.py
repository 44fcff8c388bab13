"""`shardyard runs`: the runs in a folder and how they stand."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.options import json_option, runs_dir_option
from shardyard.cli.tables import print_table
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import RunState, read_state
from shardyard.units import format_seconds


@click.command()
@runs_dir_option
@json_option
def command(runs_dir: Path, *, as_json: bool) -> None:
    """List the runs, the most recently changed last."""
    states = sorted(_read_all(runs_dir), key=lambda state: (state.updated_at or 0, state.id))
    if as_json:
        click.echo(json.dumps([asdict(state) for state in states], indent=1))
        return
    if not states:
        click.echo(f"no runs in {runs_dir}/", err=True)
        return
    rows = [_row(state, now=time.time()) for state in states]
    print_table(("run", "state", "step", "loss", "changed"), rows)


def _read_all(runs_dir: Path) -> list[RunState]:
    if not runs_dir.is_dir():
        return []
    folders = [folder for folder in runs_dir.iterdir() if (folder / "recipe.yaml").is_file()]
    return [read_state(RunDir(folder)) for folder in folders]


def _row(state: RunState, *, now: float) -> tuple[str, str, str, str, str]:
    return (
        state.id,
        state.state,
        "" if state.step is None else f"{state.step:,}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.updated_at is None else f"{format_seconds(now - state.updated_at)} ago",
    )
