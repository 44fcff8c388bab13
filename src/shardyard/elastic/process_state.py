"""What the kernel says of a process, without asking it: stopped, waiting for storage, computing."""

import os
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"
WAITS_FOR_STORAGE = "D"
"""Or for a device's driver: no signal is heard meanwhile."""
RUNS = "R"
"""Or would, if a processor were free."""


@dataclass(frozen=True)
class ProcessState:
    """One look at the main thread of a process."""

    letter: str
    """As in proc(5)."""
    cpu_s: float
    """Processor time that it has had so far."""


def process_state(pid: int) -> ProcessState | None:
    """None: it has ended, or the system has no /proc."""
    try:
        content = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, *fields = content.rpartition(")")[2].split()  # a name may hold spaces and brackets
    if letter in "ZX":
        return None
    return ProcessState(letter, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK"))
