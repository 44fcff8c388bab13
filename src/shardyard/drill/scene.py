"""Processes that a drill has started: found by a mark in their environment, and no others.

Every process of a case inherits the mark, in any session and under any parent. A drill signals
and ends only processes with the mark.
"""

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardyard.io.polling import wait_for

_NAME = "SHARDYARD_DRILL"
_END_S = 30.0
_POLL_S = 0.05


class TaggedProcesses:
    """The processes of one case.

    Args:
        name: Of the environment variable; who starts whole drills takes another.
    """

    def __init__(self, name: str = _NAME) -> None:
        self._name = name
        self._value = secrets.token_hex(8)

    @property
    def environment(self) -> dict[str, str]:
        """For what is started; its children inherit it."""
        return {self._name: self._value}

    def pids(self) -> list[int]:
        """Return all that run, without ended ones whose parent has not waited for them."""
        return [pid for pid in _all_pids() if self.has(pid)]

    def has(self, pid: int) -> bool:
        """Whether a process is one of these and has not ended."""
        mark = f"{self._name}={self._value}".encode()
        try:
            return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to one of these; False where it is none of these, or gone."""
        if not self.has(pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def kill_all(self) -> int:
        """SIGKILL each, again until none is left; returns how many there were at first."""
        found = self.pids()

        def are_gone() -> bool:
            alive = self.pids()
            for pid in alive:
                self.signal(pid, signal.SIGKILL)
            return not alive

        wait_for(are_gone, every_s=_POLL_S, within_s=_END_S)
        return len(found)

    def wait_for_end(self, within_s: float) -> list[int]:
        """Wait until all have ended; returns those that have not."""
        wait_for(lambda: not self.pids(), every_s=_POLL_S, within_s=within_s)
        return self.pids()


def parent_of(pid: int) -> int | None:
    """The parent of a process; None where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def words_of(pid: int) -> list[str]:
    """Return the command of a process; empty where it is gone."""
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]


def environment_of(pid: int) -> dict[str, str]:
    """With which a process was started."""
    entries = (os.fsdecode(entry) for entry in _read(pid, "environ").split(b"\0")[:-1])
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _all_pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            yield int(entry.name)
