"""The process that writes telemetry, as a node's agent keeps it: started, told of ranks, ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shardyard.waiting import meanwhile

_END_S = 2.0
"""Within which it ends by itself once nobody speaks to it any more."""

Ranks = Mapping[str, Sequence[float | None]]
"""``step``, ``step_s`` and ``compute_s`` of a node's ranks, by local rank."""


@contextmanager
def telemetry_beside(
    file: Path, *, attempt: int, every_s: float | None, devices: int, ranks: Callable[[], Ranks]
) -> Iterator[None]:
    """Have a node's telemetry written while the block runs; training does not depend on it.

    Args:
        file: Where to.
        every_s: Between two lines; None: nothing is written.
        devices: Accelerators of the run on this node; 0: it computes on processors.
        ranks: Asked before each line; empty while no rank has noted anything.
    """
    if every_s is None:
        yield
        return
    command = [sys.executable, "-m", "shardyard.telemetry", str(file)]
    command += [f"--attempt={attempt}", f"--every={every_s}", f"--devices={devices}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    os.set_blocking(pipe, False)  # one that reads no more holds up no agent

    def tell() -> bool:
        """Returns True once nobody listens any more."""
        try:
            if found := ranks():
                os.write(pipe, json.dumps(found).encode() + b"\n")
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return True
        return False

    try:
        with meanwhile(tell, every_s=every_s, name="telemetry"):
            yield
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
