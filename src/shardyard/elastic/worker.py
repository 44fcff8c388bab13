"""One worker process: its set-up, the training, and an end without waits.

An error ends the process at once. Leaving through the interpreter's exit would run destructors
of the process group, which wait for ranks that wait for this one.
"""

import errno
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardyard.config.schema.recipe import Recipe
from shardyard.control_groups import usable_cores
from shardyard.elastic.heartbeat import own_heartbeat
from shardyard.elastic.process_inspection import dump_on_signal
from shardyard.elastic.rendezvous.c10d import worker_store
from shardyard.elastic.seal import Seal, seal_objects
from shardyard.elastic.shared_memory import attach, translate_semaphore_errors
from shardyard.errors import LostNodeError, LostRankError, ShardyardError, StorageError
from shardyard.io.files import make_folder, read_json_object
from shardyard.own_processes import signal_at_parent_death
from shardyard.parallel.device import process_group_backend, select_device
from shardyard.rundir.attempt_files import read_resolved, run_secret
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.set_up import translate_set_up_errors

Body = Callable[[RunDir, int, int, Callable[[], bool]], str]
"""Function of a set-up worker: (run, attempt, generation, drain_requested) -> outcome."""

_FAILURE_FILE_BYTES = 4096


def run_worker(run_dir: str, attempt: int, generation: int) -> str:
    """Entry point of every worker: train until finished or drained.

    Returns:
        ``finished`` or ``drained``.
    """
    return work(run_dir, attempt, generation, body=_train)


def work(run_dir: str, attempt: int, generation: int, *, body: Body) -> str:
    """Set this process up as one rank and run ``body``; never returns after an error."""
    die_with_agent()
    run = RunDir(Path(run_dir))
    rank = int(os.environ["RANK"])
    failure = _FailureFile(failure_path(run, attempt, rank), rank=rank, generation=generation)
    try:
        # After the failure file has its room: on a full disk the log may not open.
        _redirect_output(run.log(attempt, rank))
        # Before the first heartbeat: from then on the agent may send SIGUSR2, which would end a
        # process without a handler.
        dump_on_signal()
        own_heartbeat()
        drain_requested = _listen_for_drain()
        _join_process_group(run, attempt, generation)
        with translate_semaphore_errors():
            outcome = body(run, attempt, generation, drain_requested)
        # A model that still holds the process group aborts the process at its end.
        gc.collect()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  the outermost line of a process
        failure.end_process(_with_full_disk_named(error, run.log(attempt, rank)))
    failure.remove()
    return outcome


def failure_path(run: RunDir, attempt: int, rank: int) -> Path:
    """File in which a rank says why it ended; empty or blank while all is well."""
    return run.failure(attempt, rank)


def read_failure(path: Path, generation: int) -> dict[str, Any] | None:
    """Return a rank's record of its end in this generation; None if it could not write one."""
    try:
        content = read_json_object(path)
    except (OSError, ValueError):
        return None
    return content if content.get("generation") == generation else None


def last_words(content: dict[str, Any]) -> bytes:
    """A failure as JSON, its message cut so that it fits into the room that was reserved."""
    words = str(content["message"])
    while True:
        data = json.dumps({**content, "message": words}).encode()
        if len(data) <= _FAILURE_FILE_BYTES:
            return data
        words = words[: len(words) * 3 // 4]


def _with_full_disk_named(error: BaseException, log: Path) -> BaseException:
    """Convert a full disk's error into one that names the file: a restart makes no room there."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    file = error.filename or f"a file that this rank had opened, as it has {log},"
    return StorageError(f"{file} cannot be written: {error.strerror}. Free some space and resume.")


class _FailureFile:
    """Room for a last message, reserved early: a full disk still lets a file be overwritten."""

    def __init__(self, path: Path, *, rank: int, generation: int) -> None:
        self._path = path
        self._head = {"rank": rank, "generation": generation}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b" " * _FAILURE_FILE_BYTES)

    def end_process(self, error: BaseException) -> NoReturn:
        """Write why, tell the log, and be gone before any other code runs."""
        is_own = isinstance(error, ShardyardError)
        exit_code = error.exit_code if isinstance(error, ShardyardError) else 1
        content = {
            **self._head,
            "noted_s": time.monotonic(),  # a clock that all processes of a node share
            "error": type(error).__name__,
            "message": str(error),
            "exit_code": exit_code,
            "is_own": is_own,
            "page": error.page if isinstance(error, ShardyardError) else "",
            "is_final": is_own and not isinstance(error, LostRankError | LostNodeError),
        }
        with suppress(OSError):
            data = last_words(content).ljust(_FAILURE_FILE_BYTES)
            # Not truncated: a full disk allows an overwrite, but has no new blocks.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(descriptor, data, 0)
        with suppress(OSError):  # the log has no room of its own on a full disk
            if is_own:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            else:
                traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(exit_code)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _train(run: RunDir, attempt: int, generation: int, drain_requested: Callable[[], bool]) -> str:
    from shardyard.elastic.faults import read_faults
    from shardyard.train.hooks import Hooks
    from shardyard.train.run import train

    writes_events = dist.get_rank() == 0
    hooks = Hooks(
        generation=generation,
        drain_requested=drain_requested,
        events=EventWriter(run.events, attempt=attempt, generation=generation)
        if writes_events
        else None,
        memory=attach,
        faults=read_faults(os.environ, rank=dist.get_rank(), generation=generation),
        heartbeat=own_heartbeat(),
    )
    return train(run, attempt, hooks)


def die_with_agent() -> None:
    """Leave no orphan: the fork server dies with the agent, and this process with the server."""
    signal_at_parent_death(signal.SIGKILL)
    agent = parent_process()
    if agent is not None and connection.wait([agent.sentinel], timeout=0):
        os._exit(1)  # the agent was gone before the kernel knew of the wish


def _redirect_output(log: Path) -> None:
    make_folder(log.parent)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Line-buffered: the last lines of a killed rank are in its log.
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _listen_for_drain() -> Callable[[], bool]:
    requested = False

    def request(_number: int, _frame: FrameType | None) -> None:
        nonlocal requested
        requested = True

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to understand
    signal.signal(signal.SIGTERM, request)
    # The fork server blocks it. Unblocked after the handler is set: a pending one would kill.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return lambda: requested


def take_device(recipe: Recipe) -> torch.device:
    """Make the device of this process's local rank its own, or its share of the cores."""
    kind = recipe.cluster.device
    if kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # torch uses all cores in each process; the node's ranks would compete for them.
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, usable_cores() // processes))
    return select_device(kind, int(os.environ["LOCAL_RANK"]))


def _join_process_group(run: RunDir, attempt: int, generation: int) -> None:
    recipe = read_resolved(run.resolved(attempt)).recipe
    device = take_device(recipe)
    # Before any collective: torch unpickles the objects that peers send.
    seal_objects(Seal(run_secret(run, attempt)))
    store = worker_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), generation)
    with translate_set_up_errors(os.environ):
        dist.init_process_group(
            process_group_backend(recipe.cluster.device),
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=recipe.elastic.collective_timeout_s),
            # With a device, NCCL's communicator is made now, so its errors belong to the set-up.
            device_id=None if device.type == "cpu" else device,
        )
