"""Process that writes telemetry, kept by a node's agent: started, given ranks, read."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardyard.io.files import parse_json
from shardyard.io.polling import poll_in_background
from shardyard.own_processes import python_program

_END_S = 2.0
"""Seconds within which it ends by itself once no process writes to it any more."""

Ranks = Mapping[str, Sequence[float | None]]
"""``step``, ``step_s`` and ``compute_s`` of a node's ranks, by local rank."""


class TelemetrySupervisor:
    """Telemetry process of one node in one attempt; training does not depend on it.

    Args:
        file: File to write to.
        every_s: Seconds between two lines; None: no line is written.
        devices: Accelerators of the run on this node; 0: it computes on processors.
        ranks: Called before each line; empty until a rank has written its heartbeat.
        environ: Variables of its process, without secrets.
    """

    def __init__(
        self,
        file: Path,
        *,
        attempt: int,
        every_s: float | None,
        devices: int,
        ranks: Callable[[], Ranks],
        environ: Mapping[str, str],
    ) -> None:
        self._command = python_program(
            "shardyard.telemetry", str(file),
            f"--attempt={attempt}", f"--every={every_s}", f"--devices={devices}",
        )  # fmt: skip
        self._environ = environ
        self._every_s = every_s
        self._ranks = ranks
        self._findings: list[dict[str, Any]] = []

    def findings(self) -> list[dict[str, Any]]:
        """Problems found with this node's devices so far, in order."""
        return list(self._findings)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have it written while the block runs."""
        if self._every_s is None:
            yield
            return
        with subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environ,
        ) as process:
            assert process.stdin is not None
            pipe = process.stdin.fileno()
            os.set_blocking(pipe, False)  # one that reads no more holds up no agent
            thread = threading.Thread(target=self._read_findings, args=(process,), daemon=True)
            thread.start()
            try:
                with poll_in_background(
                    lambda: self._send_ranks(pipe), every_s=self._every_s, name="telemetry"
                ):
                    yield
            finally:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                thread.join()

    def _send_ranks(self, pipe: int) -> bool:
        """Send the ranks; return True once the other end is closed."""
        try:
            if found := self._ranks():
                os.write(pipe, json.dumps(found).encode() + b"\n")
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return True
        return False

    def _read_findings(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                self._findings.append(parse_json(line))
