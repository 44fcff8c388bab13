"""`python -m shardyard.launchers.local_job FOLDER`: the process that a local job consists of.

It leaves the terminal, starts one node entry per node, passes on the wish to drain, ends nodes that
have lost the others, begins a new session after a lost node, and writes down how it ended. It reads
job.json and writes status.json in the job's folder.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.control_groups import usable_cores
from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, LostNodeError, StorageError
from shardyard.io.files import read_json_object, write_json
from shardyard.launchers.process_identity import Identity, find_running, runs
from shardyard.rundir.contracts import hosts_of
from shardyard.rundir.layout import RunDir

MODULE = "shardyard.launchers.local_job"
_POLL_S = 0.2
PEERS_S = 20.0
"""Nodes that lost another one find out by themselves, or are asked to stop after this."""
SLACK_S = 30.0
"""Beyond elastic.drain_timeout_s, for writing the report; then a node is killed."""
_HOUR_S = 3600.0
_DRAINED = (EXIT_DRAINED, EXIT_INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """Content of job.json: the task of a local job."""

    program: list[str]
    """Starts a node entry; its arguments are added."""
    run_dir: str
    nodes: int
    fewest_nodes: int
    """The run continues with this many nodes, once node 0 has let them begin."""
    devices_per_node: int
    env: dict[str, str]
    max_restarts: int
    drain_timeout_s: float
    time_limit_s: float | None
    is_side: bool = False
    """Whether the job is one program without a place among nodes, and no training."""

    @staticmethod
    def read(folder: Path) -> "JobFile":
        return JobFile(**read_json_object(folder / "job.json"))


def supervises(pid: int, folder: str) -> bool:
    """Whether a process is the supervisor of the job in a folder, started by this user."""
    return runs(pid, _words(folder))


def supervisor_of(folder: str) -> Identity | None:
    """Find the supervisor of the job in a folder by its command line; None: no process is."""
    return find_running(_words(folder))


def _words(folder: str) -> tuple[str, ...]:
    """With which a supervisor is started."""
    return ("-m", MODULE, folder)


class Supervisor:
    """Runs the sessions of one job."""

    def __init__(self, folder: Path, job: JobFile) -> None:
        self._folder = folder
        self._job = job
        self._started_s = time.monotonic()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._stop_requested_s: float | None = None
        self._lost: list[int] = []
        """Killed or cut-off nodes without which the run cannot continue.

        This process did not kill them.
        """
        self._spared: set[int] = set()
        """The same that can be done without."""
        self.stop_reason = ""
        self.restarts = 0
        self._restarted_s: list[float] = []

    def listen(self) -> None:
        """Drain on SIGTERM and SIGINT, however often they come."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop("it was cancelled"))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of a terminal

    def run(self) -> int:
        """All sessions, to the job's exit code."""
        while True:
            codes = self._run_session()
            if self.stop_reason or not self._lost:
                break
            if not self._may_restart():
                break
            self.restarts += 1
        # Nodes that the run did without do not decide how it ended.
        counted = [code for rank, code in enumerate(codes) if rank not in self._spared]
        code = job_exit_code(counted, is_stopped=bool(self.stop_reason))
        words = ""
        if self._lost:
            words = f"node {self._lost[0]} was lost, after {self.restarts} restarts"
        self._write(codes, exit_code=code, reason=self.stop_reason or words)
        return code

    def _may_restart(self) -> bool:
        """Count a restart, if there were not too many within the last hour."""
        now_s = time.monotonic()
        # Older ones do not count: a run of weeks would be ended by losses that are days apart.
        self._restarted_s = [at_s for at_s in self._restarted_s if now_s - at_s < _HOUR_S]
        if len(self._restarted_s) >= self._job.max_restarts:
            return False
        self._restarted_s.append(now_s)
        return True

    def _stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def _run_session(self) -> list[int]:
        self._stop_requested_s, self._lost, self._spared = None, [], set()
        self._nodes = list(self._start())
        self._write([None] * self._job.nodes)
        codes: list[int | None] = []
        ended_s: float | None = None
        while None in (now := self._poll()):
            if now != codes:
                codes = now
                self._write(codes)
            missed = {rank for rank, code in enumerate(codes) if code} - self._spared
            if ended_s is None and missed:
                ended_s = time.monotonic()
            # Counted from the job's start, so that a restarted session gets no new limit.
            limit_s = self._job.time_limit_s
            if limit_s is not None and time.monotonic() - self._started_s > limit_s:
                self._stop("its time limit was over")
            is_alone = ended_s is not None and time.monotonic() - ended_s > PEERS_S
            if self.stop_reason or is_alone or self._lost:
                self._ask_to_stop()
            time.sleep(_POLL_S)
        return [node.wait() for node in self._nodes]

    def _poll(self) -> list[int | None]:
        codes = [node.poll() for node in self._nodes]
        if self._stop_requested_s is None:
            # A node that ends with 75 has lost the others, and so the others have lost it.
            lost = [
                rank
                for rank, code in enumerate(codes)
                if is_lost(code) or code == LostNodeError.exit_code
            ]
            can_go_on = self._can_do_without(lost)
            self._spared = set(lost) if can_go_on else set()
            self._lost = [] if can_go_on else lost
        return codes

    def _can_do_without(self, lost: Sequence[int]) -> bool:
        """Return whether the other nodes continue without the lost ones.

        Before they train, only node 0 knows their work. From then on another node serves the store
        in its place.
        """
        is_enough = self._job.nodes - len(lost) >= self._job.fewest_nodes
        return is_enough and (0 not in lost or self._has_started())

    def _has_started(self) -> bool:
        try:
            word = read_json_object(RunDir(Path(self._job.run_dir)).session(self._session))
        except (OSError, ValueError):
            return False
        return word.get("begins") is True

    @property
    def _session(self) -> str:
        return f"{self._folder.name}-{os.getpid()}.{self.restarts}"

    def _start(self) -> Iterator[subprocess.Popen[bytes]]:
        job = self._job
        processes = job.nodes * job.devices_per_node
        # A worker takes its share of the cores from its own node's number of processes alone.
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
        # The user's own OMP_NUM_THREADS comes later and wins.
        env = {**(threads if job.nodes > 1 else {}), **os.environ, **job.env}
        hosts = hosts_of(os.environ, job.nodes)
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"{hosts.address}:{free.getsockname()[1]}"
        for rank in range(job.nodes):
            words = ["--node-rank", rank, "--nodes", job.nodes, "--rendezvous", endpoint]
            words += ["--session", self._session, "--store-moves"]
            place = [] if job.is_side else map(str, words)
            # Appended, because each session of the job writes to the same file.
            with (self._folder / f"node-{rank}.log").open("ab") as log:
                yield subprocess.Popen(
                    [*hosts.enter[rank], *job.program, *place],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    preexec_fn=end_with_parent,
                )

    def _ask_to_stop(self) -> None:
        """Ask once; kill what has not drained in time."""
        now_s = time.monotonic()
        if self._stop_requested_s is None:
            self._stop_requested_s = now_s
            number = signal.SIGTERM
        elif now_s - self._stop_requested_s > self._job.drain_timeout_s + SLACK_S:
            number = signal.SIGKILL
        else:
            return
        for node in self._nodes:
            if node.poll() is None:
                node.send_signal(number)

    def _write(
        self, codes: Sequence[int | None], *, exit_code: int | None = None, reason: str = ""
    ) -> None:
        content: dict[str, Any] = {
            "exit_code": exit_code,
            "reason": reason,
            "restarts": self.restarts,
            "nodes": [
                {"pid": node.pid, "exit_code": code}
                for node, code in zip(self._nodes, codes, strict=True)
            ],
        }
        if not self._folder.is_dir():
            return  # it went with the run's folder: make nothing in its place
        try:
            write_json(self._folder / "status.json", content)
        except StorageError:
            if self._folder.is_dir():  # else it went while this was written
                raise


def job_exit_code(codes: Sequence[int], *, is_stopped: bool) -> int:
    """The exit code of a job from those of its nodes; negative: killed by a signal."""
    if not any(codes):
        return 0
    said = [code for code in codes if code and not is_lost(code)]
    failed = [code for code in said if code not in _DRAINED]
    if is_stopped:
        # Of a job that was asked to stop, 143 is the answer unless a node failed.
        return (failed or said or [1])[0]
    # Peers of a lost or failed node drain: that is not how the job ended.
    return (failed or [1])[0] if failed or any(map(is_lost, codes)) else said[0]


def is_lost(code: int | None) -> bool:
    """Whether a node was killed, or its agent was (128 + the signal's number)."""
    return code is not None and (code < 0 or (code > 128 and code not in _DRAINED))


def end_with_parent() -> None:
    """Have the kernel drain this node should the supervisor be killed (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        # prctl(2): a fork clears this setting and an exec keeps it, so it is set between the two.
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def main(folder: Path) -> int:
    """Leave the terminal, print who supervises, and supervise."""
    # Twice a child: nobody has to wait for its end, and no terminal can become its own.
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    supervisor = Supervisor(folder, JobFile.read(folder))
    # Before the identity is printed: from then on a cancel may come.
    supervisor.listen()
    me = Identity.of(os.getpid())
    assert me is not None
    print(json.dumps([me.pid, me.started, me.boot]), flush=True)
    log = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # Moving stdout off its pipe lets `start_supervisor` return.
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    with suppress(OSError):
        os.close(log)
        os.close(nothing)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
