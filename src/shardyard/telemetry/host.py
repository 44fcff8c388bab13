"""Counters of a node's kernel: processors, memory, disks and network.

Missing is None, never 0.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from shardyard.control_groups import processor_limit
from shardyard.hardware.network_counters import LOOPBACK, efa_sent_bytes, moved_bytes

# How often this node's part of the run has used up its limit of processor time.


class Throttled:
    """The counts of the control group that limits this process, which stays the same."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._limit = processor_limit(root)

    def read(self) -> dict[str, float | None]:
        """The limit in cores, periods so far in which there was anything to do, and those of them
        in which the limit was used up; None where there is no limit."""
        counts: dict[str, int] = {}
        if self._limit is not None:
            with suppress(OSError, ValueError):
                for line in (self._limit.group / "cpu.stat").read_text().splitlines():
                    name, _, value = line.partition(" ")
                    counts[name] = int(value)
        return {
            "cpu_limit_cores": None if self._limit is None else self._limit.cores,
            "cpu_limit_periods": counts.get("nr_periods"),
            "cpu_throttled_periods": counts.get("nr_throttled"),
        }


_SECTOR_BYTES = 512
"""Sector size in /proc/diskstats, independent of a disk's own."""
_IDLE = (3, 4)
"""Indices of idle times in /proc/stat: idle, and idle while waiting for a disk."""


class Host:
    """This node, since the last look."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._ticks_s = 1 / os.sysconf("SC_CLK_TCK")
        self._sampled_s = time.monotonic()
        self._busy_s = self._cpu_busy_s()
        self._throttled = Throttled(root)
        self._is_disk: dict[str, bool] = {}

    def read(self) -> dict[str, float | None]:
        """The numbers of NODE_FIELDS."""
        memory = self._memory()
        read, written = self._disks()
        efa = efa_sent_bytes(self._root)
        interfaces = moved_bytes(self._root).items()
        moved = [both for name, both in interfaces if name not in LOOPBACK]
        return {
            "cpu_busy_cores": self._busy_cores(),
            **self._throttled.read(),
            "memory_available_bytes": memory.get("MemAvailable"),
            "page_cache_bytes": memory.get("Cached"),
            "disk_read_bytes": read,
            "disk_written_bytes": written,
            "network_sent_bytes": sum(sent for _, sent in moved) if moved else None,
            "network_received_bytes": sum(received for received, _ in moved) if moved else None,
            "efa_sent_bytes": sum(efa.values()) if efa else None,
        }

    def _busy_cores(self) -> float | None:
        now_s, busy_s = time.monotonic(), self._cpu_busy_s()
        took_s, before_s = now_s - self._sampled_s, self._busy_s
        self._sampled_s, self._busy_s = now_s, busy_s
        if busy_s is None or before_s is None or took_s <= 0:
            return None
        return round((busy_s - before_s) / took_s, 2)

    def _cpu_busy_s(self) -> float | None:
        try:
            with (self._root / "proc/stat").open() as file:
                times = [int(part) for part in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        return sum(t for k, t in enumerate(times) if k not in _IDLE) * self._ticks_s

    def _memory(self) -> dict[str, int]:
        found = {}
        with suppress(OSError, ValueError):
            for line in (self._root / "proc/meminfo").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("MemAvailable", "Cached"):
                    found[name] = int(value.split()[0]) * 1024
        return found

    def _disks(self) -> tuple[int | None, int | None]:
        """Bytes read and written of whole disks; their partitions would count twice."""
        read = written = None
        with suppress(OSError, ValueError, IndexError):
            for line in (self._root / "proc/diskstats").read_text().splitlines():
                parts = line.split()
                if not self._is_whole_disk(parts[2]):
                    continue  # a partition, a loop device, or a volume over other disks
                read = (read or 0) + int(parts[5]) * _SECTOR_BYTES
                written = (written or 0) + int(parts[9]) * _SECTOR_BYTES
        return read, written

    def _is_whole_disk(self, name: str) -> bool:
        """Looked up once: a node may have dozens of loop devices, and a line comes often."""
        if name not in self._is_disk:
            self._is_disk[name] = (self._root / "sys/block" / name / "device").exists()
        return self._is_disk[name]
