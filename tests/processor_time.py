"""Processor seconds of whole processes, as multiples of what a fixed one takes on this machine.

The speed of one machine's processor differs by half from minute to minute, and that of another by
more: a limit in seconds fails on a slow one without a fault. Seconds on an idle machine are
measured by benchmarks/start_up.py.
"""

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REFERENCE = (sys.executable, "-c", "import click, inspect, email.message, pydantic.main, yaml")
"""0.3 s on the machine of benchmarks/results/cpu-2core: imports, as most of an answer's time is."""
TIMES = 3


def processor_s(command: Sequence[str], folder: Path) -> float:
    """User and system seconds of `command`, run in `folder` to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=False, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def times_the_reference(command: Sequence[str], folder: Path) -> float:
    """The least ratio of `command`'s processor time to the reference's, started in turns."""
    return min(processor_s(command, folder) / processor_s(REFERENCE, folder) for _ in range(TIMES))
