"""`python -m shardyard.trackers RUN_DIR SERVICE --attempt N`: sends a run until stdin ends.

It is a separate process: a client may hang, or take long, and only the end of the run waits
for it, for a while. The last line of stdin sets the end of that wait, in seconds of the
machine's monotonic clock, which all processes share. Each line of stdout is one JSON
object: {"address"}, {"problem"}, and at the end {"unsent", "problem"}. Keys of services are
only in the environment.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.errors import RequestError, ShardyardError
from shardyard.io.files import FILE_MODE, make_folder, take_lock
from shardyard.launchers.secrets import redact
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import read_script
from shardyard.rundir.state import has_attempt_ended
from shardyard.trackers.run_feed import Uploader, read_attempt_metadata
from shardyard.trackers.service import SERVICES, service_named
from shardyard.trackers.supervisor import exporting

ALL = "all"
"""Argument in place of a service: all that a script named."""
_EVERY_S = 5.0
_NICE = 10
"""Training goes first."""
_NOT_FOR_IT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Slurm asks all processes of a node to stop; the run drains first, and stdin says when it has."""
_ORPHAN_S = 120.0
"""Seconds for which a run is followed while it drains, after its command line was killed."""
_ORPHAN_END_S = 20.0


class Parent:
    """Messages from and to the process that started this one."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdout = stdout
        self._has_ended = threading.Event()
        self._is_last = threading.Lock()
        self.until_s: float | None = None
        """When all is to be over, by the monotonic clock; None: it was lost before it could say."""
        threading.Thread(target=self._listen, args=(stdin,), daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; whether it has come."""
        return self._has_ended.wait(seconds)

    def send(self, **content: Any) -> None:
        """Say something, if it is still there."""
        with suppress(OSError):
            os.write(self._stdout, json.dumps(content).encode() + b"\n")

    def send_final(self, unsent: int | None, problem: str) -> None:
        """Say what came of it; the first time counts."""
        if self._is_last.acquire(blocking=False):
            self.send(unsent=unsent, problem=problem)

    def _listen(self, stdin: int) -> None:
        with os.fdopen(stdin, encoding="utf-8") as lines:
            for line in lines:
                with suppress(ValueError):
                    self.until_s = float(line)
        self._has_ended.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Send until stdin ends; 0: the service has all."""
    parser = argparse.ArgumentParser(prog="python -m shardyard.trackers", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("service", choices=(*SERVICES, ALL), help=f"{ALL}: of a script's run")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    args = parser.parse_args(argv)
    os.nice(_NICE)
    for number in _NOT_FOR_IT:
        signal.signal(number, signal.SIG_IGN)
    if args.service == ALL:
        return _supervise(RunDir(args.run_dir.resolve()), args.attempt)
    parent = Parent(*_own_pipes())
    run = RunDir(args.run_dir.resolve())
    hidden = [os.environ[name] for name in _secret_names(run, args.attempt) if name in os.environ]
    sending = Uploader(
        service_named(args.service),
        read_attempt_metadata(run, args.attempt),
        on_problem=lambda words: parent.send(problem=redact(words, hidden)),
        address=lambda words: parent.send(address=words),
    )
    # a client may hang in any call, and only another thread sees the end then
    threading.Thread(target=_give_up, args=(sending, parent, hidden), daemon=True).start()
    lock = _wait_for_lock(run, args.service, parent)
    if lock is None:
        parent.send_final(sending.unsent, "another process sends this run there.")
        return 1
    while not parent.wait(_EVERY_S):
        sending.poll()
    if parent.until_s is None:
        _follow_orphan(sending, run, args.attempt)
    until_s = parent.until_s or time.monotonic() + _ORPHAN_END_S
    try:
        has_all = sending.end(until_s=until_s)
    except Exception as error:
        words = f"sending broke off ({type(error).__name__}: {error})."
        parent.send_final(sending.unsent, redact(words, hidden))
        raise  # its trace goes into the log
    parent.send_final(0 if has_all else sending.unsent, redact(sending.problem, hidden))
    return 0 if has_all else 1


def _supervise(run: RunDir, attempt: int) -> int:
    """Send a script's run to all its services until stdin ends, each by a process of its own.

    Rank 0 of the script starts this. It does what the command line does for a recipe's run, and
    outlives a script that is killed.
    """
    script = read_script(run, attempt)
    if script is None:
        raise RequestError(f"{run.script(attempt)} cannot be read, so nothing is sent.")
    with exporting(run, attempt, script.recipe(), os.environ):
        sys.stdin.buffer.read()
    return 0


def _give_up(sending: Uploader, parent: Parent, hidden: list[str]) -> None:
    """End the process when its time is over, in any state."""
    parent.wait()
    until_s = parent.until_s or time.monotonic() + _ORPHAN_S + _ORPHAN_END_S
    time.sleep(max(0.0, until_s - time.monotonic()))
    words = (
        sending.problem or "it did not take all in time. Is its server well, and reached from here?"
    )
    parent.send_final(sending.unsent, redact(words, hidden))
    os._exit(1)


def _follow_orphan(sending: Uploader, run: RunDir, attempt: int) -> None:
    """Continue while the agent, whose command line was killed, drains."""
    until_s = time.monotonic() + _ORPHAN_S
    while not has_attempt_ended(run, attempt) and time.monotonic() < until_s:
        sending.poll()
        time.sleep(1.0)


def _wait_for_lock(run: RunDir, service: str, parent: Parent) -> int | None:
    """One process sends a run to a service: two would each make it there. None: it has one."""
    make_folder(run.exporters)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    lock = os.open(run.exporters / f"{service}.lock", flags, FILE_MODE)
    while not take_lock(lock):  # of the attempt before, which sends its last
        if parent.wait(1.0):
            return None
    return lock


def _secret_names(run: RunDir, attempt: int) -> list[str]:
    if read_script(run, attempt) is not None:
        return []
    return list(read_resolved(run.resolved(attempt)).recipe.secrets)


def _own_pipes() -> tuple[int, int]:
    """Return the parent's pipes, only for this process: clients start others, which keep theirs."""
    pipes = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what clients print goes into the log
    os.close(null)
    return pipes


if __name__ == "__main__":
    try:
        code = main()
    except ShardyardError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # what a client wants to do at an end could wait for its server
