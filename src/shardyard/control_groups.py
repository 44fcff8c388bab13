"""Limits of this process's control groups on cores and memory, and the kernel's kills in them.

They hold for a container or a job step, which still sees all cores and all memory of the machine.
Once its processes have used up the limit of processor time, it pauses as a whole for the rest of
the period (100 ms, mostly). Where they fill the limit of memory, the kernel kills one of them.
Version 1 and 2 of control groups are read; elsewhere than on Linux there are none.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardyard.units import format_bytes

_MOUNTED = "sys/fs/cgroup"


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the control group of this process and those above it.

    In a container of its own name space its group is the topmost one. In others the path is the
    host's, of which only the end exists.

    Args:
        controller: ``cpu`` or ``memory``.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mounted = root / _MOUNTED / (controller if controllers else "")
            group = mounted / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mounted))


@dataclass(frozen=True)
class ProcessorLimit:
    """Processor limit of one control group."""

    group: Path
    cores: float


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads at once are useful; at least 1."""
    bound, limit = len(os.sched_getaffinity(0)), processor_limit(root)
    return bound if limit is None else max(1, min(bound, int(limit.cores)))


def processor_limit(root: Path = Path("/")) -> ProcessorLimit | None:
    """The tightest of the groups that this process is in; None: none of them has one."""
    limits = (_processor_limit_of(folder) for folder in groups_of("cpu", root))
    return min((each for each in limits if each), key=lambda limit: limit.cores, default=None)


def _processor_limit_of(group: Path) -> ProcessorLimit | None:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()  # of version 2
        return None if quota == "max" else ProcessorLimit(group, int(quota) / int(period))
    with suppress(OSError, ValueError):
        names = (f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        quota_us, period_us = (int((group / name).read_text()) for name in names)
        return ProcessorLimit(group, quota_us / period_us) if quota_us > 0 else None
    return None


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of one control group."""

    group: Path
    bytes: int

    @property
    def used_bytes(self) -> int | None:
        """Bytes that its processes hold now, without files that the kernel would drop first.

        None if not readable.
        """
        used = _first_number(self.group, "memory.current", "memory.usage_in_bytes")
        return None if used is None else max(0, used - _inactive_file_bytes(self.group))

    @property
    def peak_bytes(self) -> int | None:
        """The most they ever held; None: an older kernel does not count it."""
        return _first_number(self.group, "memory.peak", "memory.max_usage_in_bytes")

    def __str__(self) -> str:
        return f"the memory limit of {format_bytes(self.bytes)} of control group {self.group}"


def machine_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that all processes of this container or job step may fill together."""
    limit, machine = memory_limit(root), machine_memory_bytes()
    return machine if limit is None else min(machine, limit.bytes)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest of the groups that this process is in; None: none is below the machine's."""
    limits = (_memory_limit_of(folder) for folder in groups_of("memory", root))
    tightest = min((each for each in limits if each), key=lambda limit: limit.bytes, default=None)
    return tightest if tightest and tightest.bytes < machine_memory_bytes() else None


class OutOfMemoryKills:
    """The kernel's kills in the groups of this process, since this was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._count()

    def words(self) -> str | None:
        """Limit and peak, if the kernel has killed for want of memory since; None: it has not."""
        if self._count() <= self._before:
            return None
        if (limit := memory_limit(self._root)) is None:
            return "the machine ran out of memory"
        peak = limit.peak_bytes
        held = "" if peak is None else f", at a peak of {format_bytes(peak)}"
        return f"{limit} was reached{held}"

    def _count(self) -> int:
        return sum(map(_kills_of, groups_of("memory", self._root)))


def _memory_limit_of(group: Path) -> MemoryLimit | None:
    found = _first_number(group, "memory.max", "memory.limit_in_bytes")
    return None if found is None else MemoryLimit(group, found)


def _kills_of(group: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        for key, _, value in (line.partition(" ") for line in _lines(group / name)):
            if key == "oom_kill":
                return int(value)
    return 0


def _inactive_file_bytes(group: Path) -> int:
    found = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    name = "total_inactive_file" if "total_inactive_file" in found else "inactive_file"
    return int(found.get(name, 0))


def _first_number(group: Path, *names: str) -> int | None:
    for name in names:
        for line in _lines(group / name):
            with suppress(ValueError):  # "max": no limit
                return int(line)
    return None


def _lines(file: Path) -> Iterator[str]:
    with suppress(OSError):
        yield from file.read_text().splitlines()
