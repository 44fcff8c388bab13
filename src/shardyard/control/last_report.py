"""The report at the end of an attempt: the last thing done, and only if there is time for it.

Workers and agent have left by then and the lease is free: a scheduler that has lost its patience
kills this writing and nothing else. It is never why a run is said to have failed.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import ShardyardError
from shardyard.log import warn
from shardyard.report.files import write_report
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.layout import RunDir

_AGAIN_S = 0.05
"""An exception that comes while an object is finalized is printed and lost: so it comes again."""


class _OutOfTime(Exception):  # noqa: N818  not an error
    """A drain's time is over."""


def write_last_report(
    run: RunDir, attempt: int, recipe: Recipe, *, left_s: float | None
) -> Summary | None:
    """Write the report of an attempt that has ended; call from the main thread.

    Args:
        left_s: Of a drain's time, as this node's agent counted it; None: it was not asked to stop.

    Returns:
        Its numbers, also where the files could not be written; None if they cannot be read either.
    """
    if not run.attempt(attempt).is_dir():
        return None  # the folder is gone, and the agent has said so
    summary = None
    try:
        with _limited_to(left_s):
            summary = summarize(read_run(run))
            write_report(run)
    except _OutOfTime:
        _warn(
            f"the {recipe.elastic.drain_timeout_s:g} s of elastic.drain_timeout_s are over; "
            f"`shardyard report {run.handle}` writes it"
        )
    except ShardyardError as error:  # how the training ended is what counts
        _warn(str(error))
    return summary


def _warn(why: str) -> None:
    warn(f"there is no report: {why}")


@contextmanager
def _limited_to(seconds: float | None) -> Iterator[None]:
    """Raise _OutOfTime inside when the time is over; None: no limit."""
    if seconds is None:
        yield
        return
    if seconds <= 0:
        raise _OutOfTime

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
