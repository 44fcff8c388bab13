"""Parked processes: a node's next workers, ready before those that run are lost.

Each has imported what a worker needs, has made its device's context and taken a tiny step; then it
waits. As a loss ends all workers of a node, there are as many as the node has workers. They take
ranks and generation from the agent, and others are parked behind them.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, start_processes

from shardyard.config.resolved import Resolved
from shardyard.elastic.worker import die_with_agent, take_device
from shardyard.own_processes import name_process
from shardyard.rundir.attempt_files import read_resolved

_METHOD = "forkserver"
READY_NAME = "parked"
"""Name in `ps` and `top` of a process that is ready, until it is a worker."""
_WORKER_NAME = "python"
_GONE_S = 10
"""For killed processes to be gone."""


class StandbyPool:
    """The parked processes of one node, seen by its agent."""

    def __init__(self, resolved: Path, *, processes: int, logs: LogsSpecs) -> None:
        """Args:
        resolved: File of the settings that they get ready for.
        processes: Workers of the node.
        """
        self._resolved = resolved
        self._processes = processes
        self._logs = logs
        self._standby: PContext | None = None
        self._pipes: list[Connection] = []

    @property
    def is_empty(self) -> bool:
        """Whether none were started since the last were employed."""
        return self._standby is None

    def spawn(self) -> None:
        """Start as many processes as the node has workers; returns before they are ready."""
        pipe = multiprocessing.get_context(_METHOD).Pipe
        pipes = dict(enumerate(pipe() for _ in range(self._processes)))
        size = {"LOCAL_WORLD_SIZE": str(self._processes)}
        self._standby = start_processes(
            "parked",
            run_standby_worker,
            args={rank: (str(self._resolved), theirs) for rank, (_, theirs) in pipes.items()},
            envs={rank: {**size, "LOCAL_RANK": str(rank)} for rank in pipes},
            logs_specs=self._logs,
            start_method=_METHOD,
        )
        self._pipes = [ours for ours, _ in pipes.values()]
        for _, theirs in pipes.values():
            theirs.close()

    def start(self, **asked: Any) -> PContext:
        """Give the parked processes their orders, if all are ready; else start others as usual.

        Args:
            asked: As torch's ``start_processes``, all by name.
        """
        parked, self._standby = self._standby, None
        if parked is None:
            return start_processes(**asked)
        if parked.wait(0) is not None or not all(order.poll() for order in self._pipes):
            # one has ended, or with it the fork server; or one still compiles, for who knows how
            # long, and would take the time of the cores from those that are needed now
            parked.close(signal.SIGKILL, _GONE_S)
            return start_processes(**asked)
        for rank, order in enumerate(self._pipes):
            order.send((asked["envs"][rank], asked["entrypoint"], asked["args"][rank]))
            order.close()
        return parked


def run_standby_worker(resolved: str, pipe: Connection) -> str:
    """Entry point of a parked process: get ready, and become the worker that the agent names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker; SIGTERM is held back until it is
    die_with_agent()
    settings = read_resolved(Path(resolved))
    try:
        with _silence():
            _get_ready(settings)
    except Exception as error:  # noqa: BLE001  a worker that is not warm is slow, and no more
        print(f"a parked process could not warm up: {error!r}", file=sys.stderr)
    name_process(READY_NAME)
    pipe.send(READY_NAME)
    environment, entrypoint, arguments = pipe.recv()
    name_process(_WORKER_NAME)
    os.environ.update(environment)
    outcome: str = entrypoint(*arguments)
    return outcome


def _get_ready(settings: Resolved) -> None:
    from shardyard.elastic.warm_up import warm_up  # the agent has no use for what it imports

    warm_up(settings, take_device(settings.recipe))


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the output of libraries about a tiny model, which is of no use to users."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)
