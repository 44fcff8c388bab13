"""`python -m shardyard.telemetry FILE`: writes what a node does, line by line, until stdin ends.

A process of its own, started by the node's agent: what it asks may hang, or cost time, and no
training waits for it. Each line of stdin holds the newest steps of the node's ranks, as JSON; each
of stdout something that is wrong with a device, or is over.
"""

import argparse
import json
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import parse_json
from shardyard.rundir.jsonl import LineWriter
from shardyard.rundir.telemetry import (
    DEVICE_FIELDS,
    LINK_FIELDS,
    SLOWED_BY,
    TelemetryHeader,
    sample_of,
)
from shardyard.telemetry.health.devices import DeviceHealthMonitor
from shardyard.telemetry.host import Host
from shardyard.telemetry.poller import DevicePoller, StuckCounterDetector
from shardyard.telemetry.vendors import (
    Counters,
    Device,
    Opens,
    Reading,
    open_amdsmi,
    open_hlml,
    open_nvml,
)

VENDORS: tuple[Opens, ...] = (open_nvml, open_amdsmi, open_hlml)

_PATIENCE_S = 1.0
"""Longest wait of a line for the devices' answers, at most half its interval."""
_ERROR_WAIT_S = 5.0
_NICE = 10
"""Training goes first."""


class Devices:
    """All devices of the node, asked side by side."""

    def __init__(self, counters: Counters | None, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._completions: SimpleQueue[None] = SimpleQueue()
        self._watched = [
            DevicePoller(partial(counters.device, k), partial(counters.read, k), self._completions)
            for k in range(counters.count)
        ] if counters else []  # fmt: skip
        self._stuck_detector = StuckCounterDetector(len(self._watched))
        self._errors: deque[tuple[int, int]] = deque(maxlen=1000)
        if counters:
            threading.Thread(target=self._listen, args=(counters,), daemon=True).start()

    @property
    def devices(self) -> list[Device]:
        """Devices that have answered so far."""
        return [watched.device for watched in self._watched]

    def ask(self) -> None:
        """Have all of them read at once, and wait for those that answer soon."""
        asked = [watched for watched in self._watched if watched.ask()]
        until_s = time.monotonic() + self._patience_s
        while not all(watched.is_idle for watched in asked):
            try:
                self._completions.get(timeout=max(0.0, until_s - time.monotonic()))
            except Empty:
                return

    def read(self) -> dict[str, Any]:
        """The part of a line that is theirs."""
        if not self._watched:
            return {}
        self.ask()
        readings = [watched.take() for watched in self._watched]
        columns = {
            field.name: [_short(getattr(r or Reading(), field.name)) for r in readings]
            for field in (*DEVICE_FIELDS, *LINK_FIELDS)
        }
        result: dict[str, Any] = {"devices": {k: v for k, v in columns.items() if _any(v)}}
        if any(r is not None and r.slowed_by for r in readings):
            result["devices"][SLOWED_BY] = [None if r is None else r.slowed_by for r in readings]
        if silent := [k for k, r in enumerate(readings) if r is None]:
            result["unanswered"] = silent
        if stuck := self._stuck_detector.update(columns):
            result["stuck"] = stuck
        if self._errors:
            result["xid"] = [list(self._errors.popleft()) for _ in range(len(self._errors))]
        return result

    def _listen(self, counters: Counters) -> None:
        with suppress(Exception):  # a driver that tells no errors, or no more
            while True:
                if (error := counters.wait_for_error(_ERROR_WAIT_S)) is not None:
                    self._errors.append(error)


class FromAgent:
    """Messages of the agent on its ranks, which also show that it is alive."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._partial_line = b""
        self.ranks: dict[str, Any] | None = None

    def wait(self, until_s: float) -> bool:
        """Take what comes until then; returns whether the agent is still there."""
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left_s)[0]:
                data = os.read(self._descriptor, 65536)
                if not data:
                    return False
                *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                for line in lines[-1:]:
                    with suppress(ValueError):
                        self.ranks = parse_json(line)
        return True

    def take(self) -> dict[str, Any]:
        """Return the messages since the last line."""
        ranks, self.ranks = self.ranks, None
        return {"ranks": ranks} if ranks else {}


def write_lines(
    file: LineWriter,
    devices: Devices,
    host: Host,
    agent: FromAgent,
    *,
    attempt: int,
    every_s: float,
) -> None:
    """A head, then a line each interval until the agent ends."""
    devices.ask()  # with their first answer they say what they are
    head = TelemetryHeader(
        t=round(time.time(), 3),
        node=socket.gethostname(),
        attempt=attempt,
        cores=os.cpu_count() or 0,
        names=tuple(device.name for device in devices.devices),
        memory_bytes=tuple(device.memory_bytes for device in devices.devices),
    )
    judge = DeviceHealthMonitor()
    lines: deque[dict[str, Any]] = deque([head.line()])
    next_s = time.monotonic() + every_s
    while agent.wait(next_s):
        next_s = max(next_s + every_s, time.monotonic())  # a machine that slept is not caught up
        t = {"t": round(time.time(), 3)}
        line = {**t, **devices.read(), "host": host.read(), **agent.take()}
        if found := [each.fields() for each in judge.evaluate(sample_of(head, line))]:
            line["findings"] = found
            print(*map(json.dumps, found), sep="\n", flush=True)
        lines.append(line)
        with suppress(StorageError):  # a full disk: the head, and the newest, once there is room
            while lines:
                file.append(lines[0])
                lines.popleft()
        while len(lines) > 2:
            del lines[1]


def main(argv: Sequence[str] | None = None, *, vendors: Sequence[Opens] = VENDORS) -> int:
    """Write until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m shardyard.telemetry", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    parser.add_argument("--every", type=float, required=True, metavar="S", help="between lines")
    parser.add_argument("--devices", type=int, default=0, help="of the run on this node, at most")
    args = parser.parse_args(argv)
    os.nice(_NICE)
    opened = (opens(args.devices) for opens in vendors if args.devices)
    counters = next((found for found in opened if found is not None), None)
    try:
        file = LineWriter(args.file)
    except StorageError as error:
        print(f"telemetry: {error}", file=sys.stderr, flush=True)
        return 1
    devices = Devices(counters, patience_s=min(_PATIENCE_S, args.every / 2))
    agent = FromAgent(sys.stdin.fileno())
    write_lines(file, devices, Host(), agent, attempt=args.attempt, every_s=args.every)
    return 0


def _short(value: float | None) -> float | None:
    return round(value, 3) if isinstance(value, float) else value


def _any(values: Sequence[object]) -> bool:
    return any(value is not None for value in values)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a counter that hangs holds up no end
