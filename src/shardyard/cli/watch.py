"""`shardyard watch`: a job's output until its end; returns the job's exit code."""

import time
from collections.abc import Callable
from pathlib import Path

import click

from shardyard.cli.logs import print_lines
from shardyard.cli.options import (
    launchers_in,
    raw_option,
    run_argument,
    runs_dir_option,
    side_option,
)
from shardyard.control.follow import replay
from shardyard.control.job import (
    LaunchedJob,
    Which,
    exit_code_of,
    is_trained_here,
    launched_of,
    wait_until,
)
from shardyard.errors import EXIT_INTERRUPTED, RequestError
from shardyard.io.terminal import echo, echo_err
from shardyard.launchers.base import JobState, JobStatus
from shardyard.rundir.layout import find_run
from shardyard.rundir.state import read_state, resume_words


@click.command()
@run_argument
@click.option(
    "--all", "is_all", is_flag=True, help="Show the output of all nodes, each line with its node."
)
@side_option
@raw_option
@runs_dir_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    is_all: bool,
    is_side: bool,
    is_raw: bool,
    runs_dir: Path,
) -> int:
    """Follow RUN (path, id or its beginning) until its job ends.

    Ctrl-C stops following, not the job. Control characters are shown as text, such as \\x1b.
    """
    which: Which = "side" if is_side else "any"
    run_dir = find_run(run, runs_dir)
    if is_trained_here(run_dir) and not is_side:
        replay(run_dir, echo, is_followed=True)
        return 0 if read_state(run_dir).state == "finished" else 1
    launched = launched_of(run_dir, launchers_in(context), which=which)
    return watch(launched, node=None if is_all else 0, is_raw=is_raw)


def watch(
    launched: LaunchedJob,
    *,
    node: int | None,
    is_raw: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the job's output until it is over; returns its exit code."""
    handle = f"{launched.run_dir.handle}{' --side' * launched.is_side}"
    try:
        status = wait_until(launched, lambda status: status.state != JobState.WAITING, sleep=sleep)
        if status.state != JobState.GONE:
            print_lines(launched, node=node, follow=True, is_raw=is_raw)
        # the output ends a little before the scheduler says how the job did
        status = wait_until(launched, lambda status: status.state.is_over, sleep=sleep)
    except KeyboardInterrupt:
        echo_err(
            f"\nwatching ended, the job continues. `shardyard watch {handle}` follows it again, "
            f"`shardyard cancel {handle}` stops it"
        )
        return EXIT_INTERRUPTED
    code = exit_code_of(status)
    echo_err(_last_words(launched, status, code))
    return code


def _last_words(launched: LaunchedJob, status: JobStatus, code: int) -> str:
    handle = launched.run_dir.handle
    words = f"job {launched.id} {status.state.value}: {status.reason} (exit code {code})"
    if launched.is_side:
        return words
    if status.state == JobState.SUCCEEDED:
        return f"{words}. `shardyard report {handle}` shows the run"
    if code == RequestError.exit_code:
        return f"{words}. Correct what its output names; then `shardyard resume {handle}`"
    return f"{words}. {resume_words(launched.run_dir)}"
