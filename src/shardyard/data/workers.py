"""Runs independent tasks in processes that end when this one does, however it ends.

concurrent.futures leaves its processes waiting for ever when the parent is killed, and
multiprocessing.Pool waits for ever when a worker is. Here each worker has one pipe of its own: both
ends notice at once when the other is gone.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardyard.errors import DataError, ShardyardError
from shardyard.plugins import raised_by

Task = Callable[[], None]
"""Work without a result; it can be sent to another process."""


class ResumableTask(Protocol):
    """Work that leaves a record when it is finished."""

    @property
    def size_bytes(self) -> int:
        """Bytes of input, for the progress."""

    def finished(self) -> dict[str, Any] | None:
        """Return the record, or None if the work is not finished."""

    def __call__(self) -> None:
        """Do the work."""


_AnyTask = TypeVar("_AnyTask", bound=Task)


def run_unfinished(
    tasks: Sequence[ResumableTask], *, workers: int, on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Run the tasks that are not finished, as `run_tasks` does; return the records of all.

    Args:
        on_progress: Called after each task with the finished bytes and those of all tasks.
    """
    total_bytes = sum(task.size_bytes for task in tasks)
    waiting = [task for task in tasks if task.finished() is None]
    done_bytes = total_bytes - sum(task.size_bytes for task in waiting)

    def on_done(task: ResumableTask) -> None:
        nonlocal done_bytes
        done_bytes += task.size_bytes
        on_progress(done_bytes, total_bytes)

    run_tasks(waiting, workers=workers, on_done=on_done)
    records = [record for task in tasks if (record := task.finished()) is not None]
    assert len(records) == len(tasks)
    return records


def run_tasks(
    tasks: Sequence[_AnyTask], *, workers: int, on_done: Callable[[_AnyTask], None]
) -> None:
    """Run all tasks, at most ``workers`` at a time; with one worker, in this process.

    Args:
        on_done: Called here after each task, in the order in which they end.

    Raises:
        ShardyardError: A task raised it; tasks still running are killed.
        DataError: A worker was killed, or a task failed in an unexpected way.
    """
    if workers == 1 or len(tasks) == 1:
        for task in tasks:
            _run_task(task)
            on_done(task)
        return
    with _started(min(workers, len(tasks))) as processes:
        _hand_out(list(tasks), processes, on_done)


Processes = dict[Connection, SpawnProcess]
"""Our end of each worker's pipe -> the worker."""


@contextmanager
def _started(count: int) -> Iterator[Processes]:
    """Start workers; kill those that are left at the end."""
    context = get_context("spawn")  # forking a process that has threads can deadlock
    processes: Processes = {}
    # Workers inherit the blocked signal: Ctrl-C reaches this process alone, which then ends them.
    # Starting the tracker, which the first worker would do, unblocks it: so that comes first.
    resource_tracker.ensure_running()
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs,), name=f"prepare-{number}", daemon=True
            )
            process.start()
            theirs.close()
            processes[ours] = process
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        yield processes
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        for ours, process in processes.items():
            process.kill()
            process.join()
            ours.close()


def _hand_out(
    waiting: list[_AnyTask], processes: Processes, on_done: Callable[[_AnyTask], None]
) -> None:
    waiting.reverse()
    running: dict[Connection, _AnyTask] = {}
    for pipe in processes:
        running[pipe] = _send(pipe, waiting.pop(), processes[pipe])
    while running:
        for ready in connection.wait(list(running)):
            assert isinstance(ready, Connection)
            try:
                error = ready.recv()
            except (EOFError, ConnectionError):
                raise _death(processes[ready]) from None
            if error is not None:
                raise error
            on_done(running.pop(ready))
            if waiting:
                running[ready] = _send(ready, waiting.pop(), processes[ready])


def _send(pipe: Connection, task: _AnyTask, process: SpawnProcess) -> _AnyTask:
    try:
        pipe.send(task)
    except ConnectionError:
        raise _death(process) from None
    return task


def _death(process: SpawnProcess) -> DataError:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return DataError(
        f"worker {process.name} {how} while preparing data; SIGKILL mostly means that memory ran "
        "out. Finished pieces are kept. Prepare again, with a smaller data.workers if it recurs."
    )


def _work(pipe: Connection) -> None:
    """Body of a worker: run one task after another until the pipe closes."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionError):
            return
        answer: ShardyardError | None = None
        try:
            _run_task(task)
        except ShardyardError as error:
            answer = error
        try:
            pipe.send(answer)
        except ConnectionError:
            return  # the parent is gone


def _run_task(task: Task) -> None:
    """Do a task; any error becomes one that fits into one message.

    Raises:
        ShardyardError: The task's own error, or one that describes it.
    """
    try:
        task()
    except (ShardyardError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of the Rust libraries, a panic is no Exception
        raise unexpected_error(str(task), error) from error


def unexpected_error(what: str, error: BaseException) -> DataError:
    """Return the error for an unexpected failure; it names the place in our code.

    Args:
        what: The work in progress.
    """
    if isinstance(error, MemoryError):
        return DataError(
            f"{what}: memory ran out. Finished pieces are kept. Prepare again with a smaller "
            "data.workers, or where there is more memory."
        )
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    plug_in = raised_by(error)
    bug = "this is a bug of shardyard: report it with this line"
    if plug_in is not None:
        bug = f"report it to the authors of {plug_in.package}: it was raised in {plug_in.what}"
    return DataError(
        f"{what}: {type(error).__name__}{where}: {error}. Finished pieces are kept. If the files "
        f"are sound, {bug}."
    )


def _die_with_parent() -> None:
    """A worker that outlives its parent could write into the folder of the next attempt."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
