"""Problems of one node and its devices, in words, from its telemetry line by line.

A number counts against a device only compared with its peers, or where the device itself
gives the reason. A missing number counts against no device. Problems that pass within a few
lines are not reported.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from shardyard.rundir.telemetry import TelemetrySample

# XIDs, the errors that NVIDIA's driver tells by number: what each means, and whose fault it is.
#
# Source: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors), as known in 2025.

Culprit = Literal["program", "device", "either"]


@dataclass(frozen=True)
class Xid:
    """One number."""

    words: str
    culprit: Culprit
    """Whom it mostly speaks against."""


_KNOWN = {
    8: Xid("a kernel ran longer than the driver waits", "either"),
    13: Xid("a kernel addressed memory that is not its own, or an instruction failed", "program"),
    31: Xid("a page fault: memory was addressed that is not mapped", "program"),
    32: Xid("a damaged stream of commands", "either"),
    38: Xid("the driver's firmware failed", "device"),
    43: Xid("a program's work was stopped after an error of its own", "program"),
    45: Xid("a program's work was cleared away, mostly after another error or a kill", "program"),
    48: Xid("two bits of memory flipped in one word and could not be corrected", "device"),
    62: Xid("the device's own controller halted", "device"),
    63: Xid("memory pages were retired or rows remapped", "device"),
    64: Xid("memory pages could not be retired or rows not remapped", "device"),
    69: Xid("an error in the engine of graphics and compute", "either"),
    74: Xid("an error of NVLink", "device"),
    79: Xid("the device has fallen off the bus", "device"),
    92: Xid("many bits flipped and were corrected", "device"),
    94: Xid("a memory error that was kept to one program", "device"),
    95: Xid("a memory error that was not kept to one program", "device"),
    109: Xid("a switch between programs took too long", "either"),
    119: Xid("the device's system processor did not answer the driver", "device"),
    120: Xid("the device's system processor failed", "device"),
    121: Xid("an error of the link to the processor (C2C)", "device"),
    140: Xid("a memory error that was not recovered", "device"),
    149: Xid("an error of NVLink that cannot be recovered", "device"),
}


def xid(code: int) -> Xid:
    """Return the known meaning of an error number."""
    return _KNOWN.get(code, Xid("an error of the driver", "either"))


Kind = Literal[
    "xid", "ecc", "slowed", "slow_clock", "silent", "slow_pcie", "throttled", "slow_network"
]

_ROW = 4
"""Lines in a row with the same result, before a problem or its end is reported."""
_SLOW_CLOCK = 0.93
"""Fraction of its peers' median; boards of one kind differ by a few steps of 15 MHz."""
_WORKS = 0.5
"""A device that is used less has no reason for its full clock."""
_SAME_XID_S = 600.0
_THROTTLED = 0.25
"""Share of the periods between two lines that used up the processor time limit."""
_SLOW_LINK = 0.9
"""Fraction of the link's highest setting, or of its peers'; the next lower setting is half."""


@dataclass(frozen=True, kw_only=True)
class DeviceFinding:
    """Something that is wrong, or is over."""

    t: float
    """When it was found, by the node's clock."""
    kind: Kind
    device: int | None
    """None: it is the node's, and no device's."""
    cause: str
    whose: Culprit = "device"
    is_over: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return asdict(self)


class DeviceHealthMonitor:
    """One node's, over the lines of one process that writes them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Kind, int | None], int] = {}
        self._reported: dict[tuple[Kind, int | None], str] = {}
        self._periods: tuple[float, float] | None = None
        """Periods of the processor time limit: all, and those that used it up."""
        self._ecc: dict[int, float] = {}
        self._xids: dict[tuple[int, int], float] = {}

    def evaluate(self, sample: TelemetrySample) -> list[DeviceFinding]:
        """Return the new findings of this line."""
        devices = set(range(len(sample.head.names)))
        slow_pcie, unknown = self._slow_pcie_links(sample)
        return [
            *self._driver_errors(sample),
            *self._memory_errors(sample),
            *self._persistent(sample, "slowed", self._throttled_clocks(sample), devices),
            *self._persistent(sample, "slow_clock", self._slow_clocks(sample), devices),
            *self._persistent(sample, "silent", self._unresponsive(sample), devices),
            *self._persistent(sample, "slow_pcie", slow_pcie, devices - unknown),
            *self._persistent(sample, "throttled", *self._throttled_cpus(sample)),
        ]

    def _driver_errors(self, sample: TelemetrySample) -> Iterator[DeviceFinding]:
        for device, code in sample.xid:
            told_t = self._xids.get((device, code))
            self._xids[device, code] = sample.t
            if told_t is not None and sample.t - told_t < _SAME_XID_S:
                continue
            known = xid(code)
            yield DeviceFinding(
                t=sample.t, kind="xid", device=device, whose=known.culprit,
                cause=f"XID {code}: {known.words}",
            )  # fmt: skip

    def _memory_errors(self, sample: TelemetrySample) -> Iterator[DeviceFinding]:
        for device, count in enumerate(sample.devices.get("ecc_uncorrected", ())):
            if count is None:
                continue
            before = self._ecc.get(device)
            self._ecc[device] = count
            if before is not None and count > before:
                words = f"{count - before:.0f} memory errors that were not corrected"
                yield DeviceFinding(t=sample.t, kind="ecc", device=device, cause=words)

    def _throttled_clocks(self, sample: TelemetrySample) -> dict[int, str]:
        return {
            device: f"its clock is held down by {why}"
            for device, why in enumerate(sample.slowed_by)
            if why
        }

    def _slow_clocks(self, sample: TelemetrySample) -> dict[int, str]:
        clocks = sample.devices.get("sm_clock_mhz", ())
        used = sample.devices.get("utilisation", ())
        at_work = {
            device: clock
            for device, (clock, share) in enumerate(zip(clocks, used, strict=False))
            if clock is not None and share is not None and share >= _WORKS
        }
        found = {}
        for device, clock in at_work.items():
            peers = [other for k, other in at_work.items() if k != device]
            is_held = device < len(sample.slowed_by) and sample.slowed_by[device]
            if len(peers) > 1 and clock < _SLOW_CLOCK * median(peers) and not is_held:
                found[device] = f"its clock is {clock:.0f} MHz, its peers' {median(peers):.0f}"
        return found

    def _slow_pcie_links(self, sample: TelemetrySample) -> tuple[dict[int, str], set[int]]:
        """Return the problems, and the devices without values in the line.

        A device at rest lowers its link, lawfully; so only those at work are checked.
        """
        now, most, used = (
            sample.devices.get(name, (None,) * len(sample.head.names))
            for name in ("pcie_link_bytes_per_s", "pcie_link_most_bytes_per_s", "utilisation")
        )
        known = {
            device: (speed, could)
            for device, (speed, could, share) in enumerate(zip(now, most, used, strict=False))
            if speed is not None and share is not None and share >= _WORKS
        }
        found = {}
        for device, (speed, could) in known.items():
            words = f"its PCIe link is set to {speed / 1e9:.1f} GB/s"
            peers = [other for k, (other, _) in known.items() if k != device]
            if could is not None and speed < _SLOW_LINK * could:
                found[device] = f"{words}, and could be to {could / 1e9:.1f}"
            elif len(peers) > 1 and speed < _SLOW_LINK * median(peers):
                found[device] = f"{words}, its peers' to {median(peers) / 1e9:.1f}"
        return found, set(range(len(sample.head.names))) - known.keys()

    def _unresponsive(self, sample: TelemetrySample) -> dict[int, str]:
        return dict.fromkeys(sample.unanswered, "its counters do not answer")

    def _throttled_cpus(self, sample: TelemetrySample) -> tuple[dict[None, str], set[None]]:
        """Return whether the processor time limit slows it.

        A line in which no process ran leaves this unknown.
        """
        limit, *counts = (
            sample.numbers.get(f"cpu_{name}")
            for name in ("limit_cores", "limit_periods", "throttled_periods")
        )
        before, self._periods = self._periods, None
        if limit is None or counts[0] is None or counts[1] is None:
            return {}, set()
        self._periods = counts[0], counts[1]
        periods = counts[0] - before[0] if before else 0
        if before is None or periods <= 0:
            return {}, set()
        share = (counts[1] - before[1]) / periods
        words = (
            f"in {share:.0%} of the periods its processes use up their limit of {limit:g} cores, "
            "and pause for the rest of each (cgroup cpu.max; resources.limits.cpu in Kubernetes)"
        )
        return {None: words} if share >= _THROTTLED else {}, {None}

    def _persistent(
        self,
        sample: TelemetrySample,
        kind: Kind,
        now: Mapping[Any, str],
        observed: Collection[int | None],
    ) -> Iterator[DeviceFinding]:
        """Yield findings that enough lines in a row agree on and the line before did not.

        Args:
            now: Current problems, by device; None: the node itself.
            observed: Devices for which the line has values.
        """
        for device in observed:
            key = (kind, device)
            is_turning = (device in now) != (key in self._reported)
            self._rows[key] = self._rows.get(key, 0) + 1 if is_turning else 0
            if self._rows[key] < _ROW:
                continue
            self._rows[key] = 0
            if is_wrong := device in now:
                self._reported[key] = now[device]
            cause = self._reported[key] if is_wrong else self._reported.pop(key)
            yield DeviceFinding(
                t=sample.t, kind=kind, device=device, cause=cause, is_over=not is_wrong,
                whose="either" if device is None else "device",  # a limit is somebody's setting
            )  # fmt: skip


class NetworkHealthMonitor:
    """Judge of all nodes, by the settings of their network links."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._reported: dict[int, str] = {}

    def evaluate(self, t: float, speeds: Mapping[int, float | None]) -> dict[int, DeviceFinding]:
        """Return node rank -> new finding.

        Args:
            speeds: Node rank -> bits/s of all of its links; None: not reported, which
                counts against no node.
        """
        known = {node: speed for node, speed in speeds.items() if speed is not None}
        found = {}
        for node, speed in known.items():
            peers = [other for k, other in known.items() if k != node]
            is_slow = bool(peers) and speed < _SLOW_LINK * median(peers)
            is_turning = is_slow != (node in self._reported)
            self._rows[node] = self._rows.get(node, 0) + 1 if is_turning else 0
            if self._rows[node] < _ROW:
                continue
            self._rows[node] = 0
            if is_slow:
                self._reported[node] = (
                    f"its network links are set to {speed / 1e9:g} Gbit/s, its peers' to "
                    f"{median(peers) / 1e9:g}"
                )
            cause = self._reported[node] if is_slow else self._reported.pop(node)
            found[node] = DeviceFinding(
                t=t, kind="slow_network", device=None, cause=cause, is_over=not is_slow
            )
        return found
