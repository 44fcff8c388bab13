"""`shardyard status`: what the scheduler says of a launched run, and how far it has come."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.launched import Launched, describe_job, find_launched, launchers_in
from shardyard.cli.options import json_option, runs_dir_option
from shardyard.cli.tables import print_table
from shardyard.errors import ShardyardError
from shardyard.launch.base import JobState, JobStatus
from shardyard.rundir.state import RunState, read_state


@click.command()
@click.argument("run")
@runs_dir_option
@json_option
@click.pass_context
def command(context: click.Context, run: str, *, runs_dir: Path, as_json: bool) -> None:
    """Say how RUN (a path, an id, or the beginning of one) and its job stand."""
    launched = find_launched(run, runs_dir, launchers_in(context))
    status = launched.status()
    if status.state not in (JobState.WAITING, JobState.GONE):
        _fetch(launched)
    state = read_state(launched.run_dir)
    if as_json:
        content = {**describe_job(launched.job, status), "run": asdict(state)}
        click.echo(json.dumps(content, indent=1))
        return
    print_table(("", "", ""), _rows(launched, status, state))


def _fetch(launched: Launched) -> None:
    """How far it has come is worth less than the job's state: without it, that is said alone."""
    try:
        launched.fetch()
    except ShardyardError as error:
        print(f"warning: no progress can be read: {error}", file=sys.stderr)


def _rows(launched: Launched, status: JobStatus, state: RunState) -> list[tuple[str, str, str]]:
    job = launched.job
    code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
    rows = [
        ("run", state.id, _run_words(state)),
        ("job", job.id, f"{job.name} on {job.launcher}"),
        ("state", status.state.value, f"{status.reason}{code}"),
    ]
    if state.step is not None:
        loss = "not finite" if state.loss is None else f"loss {state.loss:.4f}"
        rows.append(("step", f"{state.step:,}", loss))
    return rows + [("node", name, words) for name, words in status.nodes]


def _run_words(state: RunState) -> str:
    return "nothing was heard of it yet" if state.state == "new" else state.state
