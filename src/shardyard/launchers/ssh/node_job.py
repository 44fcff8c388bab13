"""`python -m shardyard.launchers.ssh.node_job FOLDER RANK`: the process of one host of a job.

It outlives the connection that started it, starts the node's program, passes on the request to
stop, ends a node that is left without the others, and writes down how it ended, as
``node-<rank>.json`` in the job's folder. Secrets come on stdin and are in no file.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import EXIT_DRAINED, StorageError
from shardyard.io.files import parse_json, read_json_object, write_json
from shardyard.launchers.local_job import PEERS_S, SLACK_S, end_with_parent
from shardyard.launchers.process_identity import Identity
from shardyard.own_processes import python_program

MODULE = "shardyard.launchers.ssh.node_job"
STOP_FILE = "stop"
"""Written into the job's folder by a cancel, for a host whose sshd does not answer."""
_POLL_S = 0.2
_LOOK_EVERY_S = 2.0
"""Between looks into the job's folder, which is on a network."""
_LATE_S = 30.0
"""Between two looks: longer, and the file system or this host was away."""
_LEAVING_S = 15.0
"""Seconds for processes that a node started to end after it; then they are killed."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class SshJob:
    """Content of job.json: the task of a job by ssh. No secret is in it."""

    module: str
    """Program of a node."""
    words: list[str]
    """Arguments of every node; a training's place among the others is added."""
    nodes: int
    hosts: list[str]
    rendezvous: str
    session: str
    env: dict[str, str]
    drain_timeout_s: float
    time_limit_s: float | None
    is_side: bool
    outlives_nodes: bool
    """Whether the others continue without a lost node."""
    lost_after_s: float = 150.0
    """A host whose heartbeat does not change for so long is lost; a file of a network's file system
    may be seen a minute late."""
    folder: str = "/"
    """Folder of the command line: a script is found from there, if the host has that folder."""

    @staticmethod
    def read(folder: Path) -> "SshJob":
        """Raise OSError or ValueError if there is none."""
        return SshJob(**read_json_object(folder / "job.json"))

    def place(self, rank: int) -> list[str]:
        """Return the arguments that give a node its place among the others."""
        if self.is_side:
            return []
        words = ["--place", "given", "--node-rank", str(rank), "--nodes", str(self.nodes)]
        words += ["--rendezvous", self.rendezvous, "--session", self.session]
        return [*words, *(["--store-moves"] if self.outlives_nodes else [])]


def _heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"node-{rank}.beat"


def state_file(folder: Path, rank: int) -> Path:
    """Return the file in which a host says how its node is."""
    return folder / f"node-{rank}.json"


def read_state(folder: Path, rank: int) -> dict[str, Any]:
    """Return what a host wrote of its node; empty: nothing yet."""
    try:
        return read_json_object(state_file(folder, rank))
    except (OSError, ValueError):
        return {}


def words_of(folder: str, rank: int) -> tuple[str, ...]:
    """Return the end of the command line of a host's process."""
    return ("-m", MODULE, folder, str(rank))


class NodeJob:
    """Runs the node of one host."""

    def __init__(self, folder: Path, rank: int, secrets: dict[str, str]) -> None:
        self._folder, self._rank = folder, rank
        self._job = SshJob.read(folder)
        self._secrets = secrets
        self._started_s = time.monotonic()
        self._stop_reason = ""
        self._stop_requested_s: float | None = None
        self._looked_s = self._started_s
        self._peer_ended_s: float | None = None
        self._beat = 0
        self._heard = dict.fromkeys(range(self._job.nodes), ("", self._started_s))
        """Last heartbeat of each host, and when it came."""
        self.identity = Identity.of(os.getpid())

    def listen(self) -> None:
        """Drain on SIGTERM and SIGINT, however often they come."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop("it was cancelled"))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the connection
        if sys.platform == "linux":
            # Orphans of the node become children of this process, which ends them.
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)

    def run(self) -> int:
        """Run the node to its end; its exit code."""
        job, folder = self._job, str(self._folder)
        program = python_program(job.module, f"{folder}/recipe.yaml", *job.words)
        node = subprocess.Popen(
            [*program, *job.place(self._rank)],
            stdin=subprocess.DEVNULL,
            cwd=job.folder if Path(job.folder).is_dir() else None,
            env={**os.environ, **job.env, **self._secrets},
            preexec_fn=end_with_parent,
        )
        self._write(None)
        while node.poll() is None:
            self._look()
            if self._stop_reason:
                self._ask_to_stop(node)
            time.sleep(_POLL_S)
        self._end_children()
        # A node that does not listen to signals yet ends by the first, without a save.
        is_early = self._stop_reason and node.returncode == -signal.SIGTERM
        code = EXIT_DRAINED if is_early else node.returncode
        self._write(code)
        return code

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _look(self) -> None:
        """Find reasons to stop: the time limit, a cancel, the end of another node."""
        now_s, job = time.monotonic(), self._job
        if job.time_limit_s is not None and now_s - self._started_s > job.time_limit_s:
            self._stop("its time limit was over")
        waited_s = now_s - self._looked_s
        if waited_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        self._send_heartbeat()
        if (self._folder / STOP_FILE).exists():
            self._stop("it was cancelled")
        if job.outlives_nodes:
            return
        others = [rank for rank in range(job.nodes) if rank != self._rank]
        self._find_lost(others, now_s, is_late=waited_s > _LATE_S)
        if self._peer_ended_s is None and any(
            read_state(self._folder, rank).get("exit_code") for rank in others
        ):
            self._peer_ended_s = now_s
        if self._peer_ended_s is not None and now_s - self._peer_ended_s > PEERS_S:
            self._stop("another node ended")

    def _send_heartbeat(self) -> None:
        self._beat += 1
        path = _heartbeat_file(self._folder, self._rank)
        scratch = path.with_name(f".{path.name}")
        # A full disk is reported by the training; an old heartbeat is no worse than none.
        with suppress(OSError):
            scratch.write_text(str(self._beat))
            scratch.replace(path)

    def _find_lost(self, others: list[int], now_s: float, *, is_late: bool) -> None:
        """Stop if another host is lost: its node's peers would wait long for its return.

        Args:
            is_late: The run folder or this host was away, and so the others may seem lost.
        """
        for rank in others:
            beat, heard_s = self._heard[rank]
            newest = beat
            with suppress(OSError):
                newest = _heartbeat_file(self._folder, rank).read_text()
            if newest != beat or is_late:
                self._heard[rank] = (newest, now_s)
            elif (
                now_s - heard_s > self._job.lost_after_s
                and read_state(self._folder, rank).get("exit_code") is None
            ):
                host, limit_s = self._job.hosts[rank], self._job.lost_after_s
                self._stop(f"{host} was lost: it sent no heartbeat for {limit_s:g} s")

    def _ask_to_stop(self, node: "subprocess.Popen[bytes]") -> None:
        """Ask once; kill what has not drained in time."""
        now_s = time.monotonic()
        if self._stop_requested_s is None:
            self._stop_requested_s = now_s
            node.terminate()
        elif now_s - self._stop_requested_s > self._job.drain_timeout_s + SLACK_S:
            node.kill()

    def _end_children(self) -> None:
        """Leave no process of the node: wait for those that end by themselves, kill the others."""
        deadline_s = time.monotonic() + (0.0 if self._stop_requested_s else _LEAVING_S)
        while children := children_of(os.getpid()):
            for pid in children:
                if time.monotonic() > deadline_s:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_POLL_S)

    def _write(self, exit_code: int | None) -> None:
        who = self.identity
        assert who is not None
        content = {
            "pid": who.pid, "started": who.started, "boot": who.boot,
            "exit_code": exit_code, "reason": self._stop_reason,
        }  # fmt: skip
        if not self._folder.is_dir():
            return  # it went with the run's folder: make nothing in its place
        try:
            write_json(state_file(self._folder, self._rank), content)
        except StorageError:
            if self._folder.is_dir():  # else it went while this was written
                raise


def children_of(pid: int) -> list[int]:
    """Return the numbers of a process's children (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def main(folder: Path, rank: int) -> int:
    """Read the secrets, print who runs, leave the connection, and run the node."""
    secrets = parse_json(sys.stdin.read())
    job = NodeJob(folder, rank, secrets)
    # Before the identity is printed: from then on a cancel may come.
    job.listen()
    assert job.identity is not None
    print(json.dumps([job.identity.pid, job.identity.started, job.identity.boot]), flush=True)
    # Moving stdout off its pipe lets the program that started this one end.
    log = os.open(folder / f"node-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    return job.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
