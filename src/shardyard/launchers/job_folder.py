"""Folder of a job that we supervise ourselves: ``logs/job-<k>/`` of the run's folder.

It holds the job's request, a log file of each node, and how each ended.
"""

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from shardyard.errors import RequestError, StorageError
from shardyard.io.files import FOLDER_MODE, make_folder
from shardyard.launchers.base import LogLine, read_logs
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir


def new_job_folder(run: RunDir) -> Path:
    """Make the folder of the run's next job.

    Raises:
        StorageError: The run folder cannot be written.
    """
    for number in itertools.count():
        folder = run.path / "logs" / f"job-{number}"
        try:
            make_folder(folder.parent)
            # mkdir fails if the folder exists, so two submissions at once cannot share a number.
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be made: {error.strerror}. The output of the nodes goes there. "
                "Check that the run folder is yours and has room."
            ) from error
        return folder
    raise AssertionError


def node_log(folder: Path, rank: int) -> Path:
    """Return the file with the output of one node."""
    return folder / f"node-{rank}.log"


def node_logs(
    folder: Path, name: str, *, count: int, node: int | None, is_over: Callable[[], bool]
) -> Iterator[LogLine]:
    """Yield lines of the nodes' files, in the order in which they are found.

    Args:
        name: The job's.
        node: Only this one; None: all.
        is_over: Whether the files are complete.

    Raises:
        RequestError: There is no such node.
    """
    if node is not None and not 0 <= node < count:
        raise RequestError(
            f"job {name} has no node {node}. It has {count}, counted from 0. Use 0 to {count - 1}."
        )
    ranks = range(count) if node is None else [node]
    return read_logs({f"node {rank}": node_log(folder, rank) for rank in ranks}, is_over=is_over)


def exit_word(exit_code: int | None) -> str:
    """Say how a node ended; negative: by a signal. None: it runs."""
    if exit_code is None:
        return "running"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return "ended" if exit_code == 0 else f"exit code {exit_code}"


def end_reason(run: RunDir) -> str:
    """Return the reason with which the run's last attempt ended; empty: it gave none."""
    ends = [event for event in read_lines(run.events) if event.get("kind") == "attempt_ended"]
    return str(ends[-1].get("reason") or "") if ends else ""
