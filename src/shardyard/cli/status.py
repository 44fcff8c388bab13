"""`shardyard status`: state of a run, its job if it was launched, and its progress."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardyard.cli.options import (
    json_option,
    launchers_in,
    run_argument,
    runs_dir_option,
    side_option,
)
from shardyard.control.follow import describe_stall
from shardyard.control.job import (
    LaunchedJob,
    Which,
    describe_job,
    fetch_progress,
    is_trained_here,
    launched_of,
    starter_of,
)
from shardyard.errors import ShardyardError, StorageError
from shardyard.io.terminal import echo, print_table
from shardyard.launchers.base import JobState, JobStatus
from shardyard.launchers.ledger import SIDE_DETAIL
from shardyard.log import warn
from shardyard.rundir.layout import RunDir, find_run
from shardyard.rundir.network import ObservedNetwork, read_network
from shardyard.rundir.state import (
    RunState,
    Spending,
    read_spending,
    read_state,
    read_state_in_list,
    unreadable,
)
from shardyard.units import format_usd


@click.command()
@run_argument
@runs_dir_option
@side_option
@json_option
@click.pass_context
def command(
    context: click.Context, run: str, *, runs_dir: Path, is_side: bool, as_json: bool
) -> None:
    """Show the state of RUN (path, id or its beginning) and of its job."""
    which: Which = "side" if is_side else "any"
    run_dir = find_run(run, runs_dir)
    if is_trained_here(run_dir) and not is_side:
        _print_trained(run_dir, as_json=as_json)
        return
    launched = launched_of(run_dir, launchers_in(context), which=which)
    status = launched.status()
    if launched.is_side:
        _print_side_job(launched, status, as_json=as_json)
        return
    state, spending, network = _read_run(launched, status)
    if as_json:
        content = {
            **describe_job(launched.submission, status),
            "run": asdict(state),
            "spent": None if spending is None else asdict(spending),
            "network": None if network is None else asdict(network),
            "max_usd": _most_usd(launched),
        }
        echo(json.dumps(content, indent=1))
        return
    print_table(("", "", ""), _rows(launched, status, state, spending, network))


def _print_trained(run_dir: RunDir, *, as_json: bool) -> None:
    """Show a run that `shardyard train` started: it has no job, and the keys of one are null."""
    state = read_state_in_list(run_dir)
    if not as_json:
        starter = f"started by {starter_of(run_dir)}"
        rows = [("run", state.id, _run_words(state)), ("job", "-", starter)]
        print_table(("", "", ""), [*rows, *_progress_rows(state)])
        return
    job = dict.fromkeys(("launcher", "job_id", "job_name", "exit_code", "spent", "max_usd"))
    content: dict[str, Any] = {
        "run_id": state.id,
        **job,
        "state": state.state,
        "reason": _reason(state),
        "nodes": [],
        "run": asdict(state),
        "network": None,
    }
    echo(json.dumps(content, indent=1))


def _read_run(
    launched: LaunchedJob, status: JobStatus
) -> tuple[RunState, Spending | None, ObservedNetwork | None]:
    """Read the run's state from its folder; an unreadable one does not hide the job."""
    folder = launched.run_dir
    is_far = not launched.launcher.capabilities.shares_folder
    is_training_elsewhere = is_far and status.state == JobState.RUNNING
    try:
        if status.state not in (JobState.WAITING, JobState.GONE):
            fetch_progress(launched)
        state = read_state(folder, is_training_remotely=is_training_elsewhere)
        return state, read_spending(folder), read_network(folder)
    except (OSError, StorageError, ValueError) as error:
        return unreadable(folder, error), None, None


def _print_side_job(launched: LaunchedJob, status: JobStatus, *, as_json: bool) -> None:
    job = launched.submission
    if as_json:
        echo(json.dumps({**describe_job(job, status), "side": job.details[SIDE_DETAIL]}, indent=1))
        return
    rows = [
        ("run", job.run_id, ""),
        ("side job", job.details[SIDE_DETAIL], f"{job.id} ({job.name}) on {job.launcher}"),
        ("state", status.state.value, _state_words(status)),
    ]
    print_table(("", "", ""), rows + [("node", name, words) for name, words in status.nodes])


def _state_words(status: JobStatus) -> str:
    code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
    return f"{status.reason}{code}"


def _rows(
    launched: LaunchedJob,
    status: JobStatus,
    state: RunState,
    spending: Spending | None,
    network: ObservedNetwork | None,
) -> list[tuple[str, str, str]]:
    job = launched.submission
    rows = [
        ("run", state.id, _run_words(state)),
        ("job", job.id, f"{job.name} on {job.launcher}"),
        ("state", status.state.value, _state_words(status)),
    ]
    rows += _progress_rows(state)
    if network is not None:
        rows.append(("network", network.words, f"according to {network.said_by}"))
    if spending is not None:
        rows.append(("spent", format_usd(spending.usd), _price_words(launched, spending)))
    return rows + [("node", name, words) for name, words in status.nodes]


def _progress_rows(state: RunState) -> list[tuple[str, str, str]]:
    rows = []
    if state.step is not None:
        loss = "not finite" if state.loss is None else f"loss {state.loss:.4f}"
        phase = "" if state.phase is None else f"phase {state.phase}, "
        rows.append(("step", f"{state.step:,}", f"{phase}{loss}"))
    if state.no_step_s is not None:
        rows.append(("stalled", "", describe_stall(state.no_step_s, state.usual_step_s)))
    return rows + [("excluded", f"node {each.node_rank}", f"{each.node}: {each.cause}")
                   for each in state.left_out]  # fmt: skip


def _run_words(state: RunState) -> str:
    if state.state == "new":
        return "no events yet"
    if state.problem is not None:
        return f"{state.state}: {state.problem}"
    reason = _reason(state)
    return f"{state.state}: {reason}" if reason and state.state != "running" else state.state


def _reason(state: RunState) -> str:
    """Why a run stopped itself, failed or was lost; empty: it did not."""
    if state.state == "lost":
        return "it ended without a word: it was killed, or its machine is gone"
    ended = state.end_reason if state.state in ("failed", "drained") else None
    return state.stop_reason or ended or ""


def _most_usd(launched: LaunchedJob) -> float | None:
    """launch.max_usd; None: not set, or what was asked is lost."""
    try:
        return launched.recipe().launch.max_usd
    except ShardyardError as error:
        warn(f"launch.max_usd is not known: {error}")
        return None


def _price_words(launched: LaunchedJob, spending: Spending) -> str:
    limit = _most_usd(launched)
    most = "" if limit is None else f"of launch.max_usd={limit:g}, "
    return f"{most}{format_usd(spending.usd_per_hour)} an hour"
