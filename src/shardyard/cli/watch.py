"""`shardyard watch`: a job's output until its end; returns the job's exit code."""

import math
import time
from collections.abc import Callable, Container
from pathlib import Path

import click

from shardyard.cli.launched import Launched, Which, exit_code_of, find_launched, launchers_in
from shardyard.cli.logs import print_lines
from shardyard.cli.options import raw_option, run_argument, runs_dir_option, side_option
from shardyard.cli.terminal import say
from shardyard.errors import EXIT_INTERRUPTED, AccessError, RequestError, ShardyardError
from shardyard.launch.base import JobState, JobStatus

_FIRST_POLL_S, _LONGEST_POLL_S = 0.5, 10.0
_ASKED_AGAIN = 30
"""Times, ``_LONGEST_POLL_S`` apart: a controller that is restarted is away for minutes."""


@click.command()
@run_argument
@click.option("--all", "is_all", is_flag=True, help="Output of all nodes, each line with its node.")
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
    """Follow RUN (a path, an id, or the beginning of one) until its job is over.

    Ctrl-C ends the watching, not the job. Control characters are shown as text, such as \\x1b.
    """
    which: Which = "side" if is_side else "any"
    launched = find_launched(run, runs_dir, launchers_in(context), which=which)
    return watch(launched, node=None if is_all else 0, is_raw=is_raw)


def watch(
    launched: Launched,
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
        say(
            f"\nwatching ended, the job goes on. `shardyard watch {handle}` follows it again, "
            f"`shardyard cancel {handle}` stops it"
        )
        return EXIT_INTERRUPTED
    code = exit_code_of(status)
    say(_last_words(launched, status, code))
    return code


def wait_until(
    launched: Launched,
    is_enough: Callable[[JobStatus], bool],
    *,
    give_up_after_s: float = math.inf,
    shown: Container[JobState] = (JobState.WAITING,),
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Ask for the job's status until it is enough, or too much time has passed.

    Args:
        shown: States in which each new reason is told.

    Returns:
        The last one, which is not enough if it was given up.
    """
    said, poll_s, waited_s = "", _FIRST_POLL_S, 0.0
    while True:
        status = _ask(launched, sleep=sleep)
        if is_enough(status) or waited_s >= give_up_after_s:
            return status
        if status.state in shown and status.reason != said:
            said = status.reason
            say(f"{status.state.value}: {said}")
        sleep(poll_s)
        waited_s += poll_s
        poll_s = min(_LONGEST_POLL_S, poll_s * 1.5)


def _ask(launched: Launched, *, sleep: Callable[[float], None]) -> JobStatus:
    """The job's status; a scheduler that does not answer is asked again for a while."""
    for attempt in range(_ASKED_AGAIN):
        try:
            return launched.status()
        except ShardyardError as error:
            if isinstance(error, RequestError | AccessError):
                raise  # asking again cannot help
            if attempt == 0:
                say(f"warning: {error} It is asked again.")
            sleep(_LONGEST_POLL_S)
    return launched.status()


def _last_words(launched: Launched, status: JobStatus, code: int) -> str:
    handle = launched.run_dir.handle
    words = f"job {launched.job.id} {status.state.value}: {status.reason} (exit code {code})"
    if launched.is_side:
        return words
    if status.state == JobState.SUCCEEDED:
        return f"{words}. `shardyard report {handle}` shows the run"
    return f"{words}. `shardyard resume {handle}` goes on from the newest durable checkpoint"
