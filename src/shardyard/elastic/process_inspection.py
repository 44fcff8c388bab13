"""State of a process as the kernel has it: stopped, waiting for storage, computing.

The process itself is not needed for an answer.
"""

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardyard.io.polling import wait_for

STOPPED = "T"
WAITS_FOR_STORAGE = "D"
"""Or for a device's driver: no signal is heard meanwhile."""
RUNS = "R"
"""Or would, if a processor were free."""


@dataclass(frozen=True)
class ProcessState:
    """One look at the main thread of a process."""

    letter: str
    """State letter, as in proc(5)."""
    cpu_s: float
    """Processor time that it has had so far."""


def process_state(pid: int) -> ProcessState | None:
    """None: it has ended, or the system has no /proc."""
    try:
        # Of the main thread: /proc/PID/stat adds up the processor time of all threads.
        content = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, *fields = content.rpartition(")")[2].split()  # a name may hold spaces and brackets
    if letter in "ZX":
        return None
    # Fields 14 and 15 of proc(5): user and system time in clock ticks. Field 4 is the first here.
    return ProcessState(letter, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK"))


# A signal makes a worker dump the stacks of all its threads into its log, even while it hangs.
#
# The interpreter's faulthandler answers the signal below Python, so neither a held GIL nor a call
# that does not return is in its way. A process that is stopped or waits for storage gets no signal.

_SIGNAL = signal.SIGUSR2
"""SIGUSR1 is what schedulers and users' code have taken."""
_ANSWER_WITHIN_S = 1.0
_POLL_S = 0.05
_MAIN_THREAD = "Current thread "
"""Begin of the section of the thread that got the signal; the kernel prefers the main one."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


@dataclass(frozen=True)
class Frame:
    """A place in Python code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def dump_on_signal() -> None:
    """Make this process dump the stacks of all its threads to stderr on a signal."""
    faulthandler.register(_SIGNAL, file=sys.stderr, all_threads=True)


def dump_stacks(logs: Mapping[int, Path], *, header: str) -> dict[int, list[Frame]]:
    """Ask processes that have called ``dump_on_signal``.

    Args:
        logs: The file to which each process, by its id, writes its stderr.
        header: Written above the stacks.

    Returns:
        The stack of the main thread, innermost first, of each process that answered in time.
    """
    begins = {pid: _announce(log, header) for pid, log in logs.items()}
    for pid in logs:
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
    stacks: dict[int, list[Frame]] = {}

    def all_responded() -> bool:
        for pid in logs.keys() - stacks.keys():
            text = _read_from(logs[pid], begins[pid])
            # Without a final newline, the dump is still being written.
            if (stack := main_stack(text)) and text.endswith("\n"):
                stacks[pid] = stack
        return stacks.keys() == logs.keys()

    wait_for(all_responded, within_s=_ANSWER_WITHIN_S, every_s=_POLL_S)
    return stacks


def main_stack(dump: str) -> list[Frame]:
    """The stack of the main thread in a dump, innermost first; empty if it is not there."""
    _, _, section = dump.partition(_MAIN_THREAD)
    frames = []
    for line in section.splitlines()[1:]:
        if (frame := _FRAME.match(line)) is None:
            break
        frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return frames


def _announce(log: Path, header: str) -> int:
    """Say in a log what the stacks are for; returns where they will begin."""
    with suppress(OSError), log.open("ab") as file:  # a full disk
        file.write(f"{header}\n".encode())
    with suppress(OSError):
        return log.stat().st_size
    return 0


def _read_from(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
