"""Runs the telemetry process over devices that a file describes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardyard.rundir.telemetry import TelemetrySample, read_telemetry

FAKE_NVML = Path(__file__).parent / "fake_nvml"


class Program:
    """One that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", file: Path, world: Path) -> None:
        self.process = process
        self.file = file
        self._world = world

    def set(self, **world: Any) -> None:
        """What the devices do from now on."""
        describe(self._world, **world)

    def tell(self, ranks: dict[str, Any]) -> None:
        """As the agent does."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(ranks).encode() + b"\n")
        self.process.stdin.flush()

    def wait_for(self, lines: int, within_s: float = 20.0) -> list[TelemetrySample]:
        """The samples, once there are so many."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if len(found := list(read_telemetry(self.file))) >= lines:
                return found
            time.sleep(0.05)
        raise AssertionError(f"fewer than {lines} lines in {within_s} s")


def describe(path: Path, **world: Any) -> None:
    """Write what the devices do, at once."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps({"devices": 8, **world}))
    scratch.replace(path)


@contextmanager
def telemetry(
    folder: Path,
    *,
    every_s: float = 0.5,
    devices: int = 8,
    visible: str | None = None,
    **world: Any,
) -> Iterator[Program]:
    """The process, ended with the block as an agent's end does."""
    file, described = folder / "telemetry" / "node-0.jsonl", folder / "nvml.json"
    describe(described, **world)
    env = {**os.environ, "PYTHONPATH": str(FAKE_NVML), "FAKE_NVML": str(described)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-m", "shardyard.telemetry", str(file), "--attempt=1"]
    command += [f"--every={every_s}", f"--devices={devices}"]
    folder.mkdir(exist_ok=True)
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, stderr=said)
    try:
        yield Program(process, file, described)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
