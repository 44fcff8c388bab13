"""Contents of `telemetry/node-<k>.jsonl`: a node's devices, processors and ranks over time.

The first line of each writing process names the node and devices of the others. Each field
is a list with one value a device or rank, so that a day of eight devices every five seconds
takes about 20 MB. A value that a device does not report is null, never 0. Counters are
written as they are; rates are computed on reading.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardyard.errors import StorageError
from shardyard.io.files import open_plain, parse_json
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class Field:
    """One number of a device or a node."""

    name: str
    """With its unit; without one: a share from 0 to 1."""
    title: str
    kind: Literal["gauge", "counter"] = "gauge"
    """Kind of number: a counter only grows, until its owner is restarted."""
    never_rests: bool = False
    """Whether a working device never reports the same number twice."""


DEVICE_FIELDS = (
    Field(name="utilisation", title="Time in which any kernel ran"),
    Field(name="memory_used_bytes", title="Memory in use"),
    Field(name="memory_copy_utilisation", title="Time in which memory was read or written"),
    Field(name="sm_clock_mhz", title="Clock of the multiprocessors"),
    Field(name="temperature_c", title="Temperature"),
    Field(name="power_w", title="Power", never_rests=True),
    Field(name="ecc_uncorrected", title="Memory errors that were not corrected", kind="counter"),
    Field(name="pcie_sent_bytes", title="Sent over PCIe", kind="counter", never_rests=True),
    Field(name="pcie_received_bytes", title="Received over PCIe", kind="counter", never_rests=True),
    Field(name="nvlink_sent_bytes", title="Sent over NVLink", kind="counter", never_rests=True),
    Field(
        name="nvlink_received_bytes", title="Received over NVLink", kind="counter", never_rests=True
    ),
)
"""Numbers of a device."""

LINK_FIELDS = (
    Field(name="pcie_link_bytes_per_s", title="What its PCIe link is set to"),
    Field(name="pcie_link_most_bytes_per_s", title="What its PCIe link could be set to"),
)
"""Numbers of a device that rest for good: they are judged, and not drawn."""

NODE_FIELDS = (
    Field(name="cpu_busy_cores", title="Cores at work"),
    Field(name="cpu_limit_cores", title="Cores that its container may use"),
    Field(name="cpu_limit_periods", title="Periods of that limit", kind="counter"),
    Field(name="cpu_throttled_periods", title="Of them, those it was used up in", kind="counter"),
    Field(name="memory_available_bytes", title="Memory that programs could have"),
    Field(name="page_cache_bytes", title="Files held in memory"),
    Field(name="disk_read_bytes", title="Read from disks", kind="counter"),
    Field(name="disk_written_bytes", title="Written to disks", kind="counter"),
    Field(name="network_sent_bytes", title="Sent over the network", kind="counter"),
    Field(name="network_received_bytes", title="Received over the network", kind="counter"),
    Field(name="efa_sent_bytes", title="Sent over EFA", kind="counter"),
)
"""Numbers of a node; those of a network are of all its interfaces but loopback."""

SLOWED_BY = "slowed_by"
"""Reason for each device's lowered clock: heat, power brake, ...; empty: none."""


@dataclass(frozen=True, kw_only=True)
class TelemetryHeader:
    """Whom the lines behind it are of."""

    t: float
    node: str
    attempt: int
    cores: int
    names: tuple[str, ...]
    """Names of the devices, in the order of all lists."""
    memory_bytes: tuple[int | None, ...]

    def line(self) -> dict[str, Any]:
        """Return the head as it is written."""
        return {
            "t": self.t,
            "node": self.node,
            "attempt": self.attempt,
            "cores": self.cores,
            "names": list(self.names),
            "memory_bytes": list(self.memory_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class TelemetrySample:
    """One line of a node."""

    head: TelemetryHeader
    t: float
    devices: dict[str, tuple[float | None, ...]]
    """By field."""
    slowed_by: tuple[str | None, ...]
    xid: tuple[tuple[int, int], ...]
    """(device, code) of the errors that the driver reported since the line before."""
    unanswered: tuple[int, ...]
    """Devices whose counters did not answer in time."""
    stuck: dict[str, tuple[int, ...]]
    """Field -> devices whose number stays constant while that of others moves."""
    numbers: dict[str, float | None]
    """Numbers of the node by field."""
    ranks: dict[str, tuple[float | None, ...]]
    """``step``, ``step_s``, ``compute_s`` of each rank of the node, by local rank."""
    findings: tuple[dict[str, Any], ...] = ()
    """Findings on devices, new or over (``telemetry/health/devices.py``)."""


def nodes_with_telemetry(run: RunDir) -> dict[int, Path]:
    """Node rank -> its file, of the nodes that have one."""
    found = {}
    for path in run.telemetry.glob("node-*.jsonl"):
        number = path.stem.removeprefix("node-")
        if number.isascii() and number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def read_telemetry(path: Path) -> Iterator[TelemetrySample]:
    """The lines of a node, in order; what is not of the form that is written is passed over."""
    head: TelemetryHeader | None = None
    try:
        file = os.fdopen(open_plain(path), "rb")
    except (FileNotFoundError, StorageError):
        return
    with file:
        for line in file:
            content = _object(line)
            if content is None:
                continue
            if "names" in content:
                head = _head(content)
            elif head is not None:
                yield sample_of(head, content)


def read_downsampled(path: Path, *, most: int) -> list[TelemetrySample]:
    """Return at most ``most`` lines of a node, evenly spread over its file, however long."""
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError:
        return []
    if size <= most * _LINE_BYTES:
        return list(read_telemetry(path))
    found, head = [], _NO_HEAD
    with path.open("rb") as file:
        for number in range(most):
            file.seek(size * number // most)
            if number:
                file.readline()  # the rest of a line
            for line in (file.readline(), file.readline()):
                content = _object(line)
                if content is None:
                    continue
                if "names" not in content:
                    found.append(sample_of(head, content))
                    break
                head = _head(content) or head
    return found


def latest_sample(path: Path) -> TelemetrySample | None:
    """The last line of a node, read without those before it."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
            file.seek(0)
            first = file.read(_TAIL_BYTES)
    except (OSError, StorageError):
        return None
    heads = [content for line in (first + b"\n" + tail).splitlines() if (content := _object(line))]
    head = next((_head(each) for each in reversed(heads) if "names" in each), None)
    if head is None:
        return None
    lines = [content for line in tail.splitlines() if (content := _object(line))]
    return next((sample_of(head, line) for line in reversed(lines) if "names" not in line), None)


_TAIL_BYTES = 16 * 2**10
_LINE_BYTES = 1500
"""Approximate bytes of a line of a node of eight devices."""
_NO_HEAD = TelemetryHeader(t=0.0, node="", attempt=0, cores=0, names=(), memory_bytes=())


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    is_timed = isinstance(content, dict) and isinstance(content.get("t"), int | float)
    return content if is_timed else None


def _head(content: dict[str, Any]) -> TelemetryHeader | None:
    names, sizes = content["names"], content.get("memory_bytes")
    if not isinstance(names, list) or not isinstance(sizes, list) or len(names) != len(sizes):
        return None
    return TelemetryHeader(
        t=content["t"],
        node=str(content.get("node")),
        attempt=_whole(content.get("attempt")) or 0,
        cores=_whole(content.get("cores")) or 0,
        names=tuple(map(str, names)),
        memory_bytes=tuple(map(_whole, sizes)),
    )


def sample_of(head: TelemetryHeader, content: dict[str, Any]) -> TelemetrySample:
    """A line behind a head; what of it is not of the form that is written is left out."""
    devices = _mapping(content.get("devices"))
    slowed = devices.pop(SLOWED_BY, None)
    count = next((len(values) for values in devices.values() if isinstance(values, list)), 0)
    stuck = _mapping(content.get("stuck"))
    return TelemetrySample(
        head=head,
        t=content["t"],
        devices={
            name: tuple(map(_number, values))
            for name, values in devices.items()
            if isinstance(values, list) and len(values) == count
        },
        slowed_by=(
            tuple(v if isinstance(v, str) else None for v in slowed)
            if isinstance(slowed, list) and len(slowed) == count
            else (None,) * count
        ),
        xid=tuple(
            (int(pair[0]), int(pair[1]))
            for pair in _list(content.get("xid"))
            if isinstance(pair, list)
            and len(pair) == 2
            and all(_whole(n) is not None for n in pair)
        ),
        unanswered=_indices(content.get("unanswered")),
        stuck={name: _indices(values) for name, values in stuck.items()},
        numbers={name: _number(value) for name, value in _mapping(content.get("host")).items()},
        ranks={
            name: tuple(map(_number, values))
            for name, values in _mapping(content.get("ranks")).items()
            if isinstance(values, list)
        },
        findings=tuple(
            found for found in _list(content.get("findings")) if isinstance(found, dict)
        ),
    )


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _indices(value: Any) -> tuple[int, ...]:
    return tuple(index for index in _list(value) if _whole(index) is not None)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
