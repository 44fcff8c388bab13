"""The cores that this process may keep busy: those it is bound to, within its group's limit.

A container or a job step with a limit of processor time still sees all cores. It stands still for
the rest of each period (100 ms, mostly) in which its processes have used the limit up, all at once.
Version 1 and 2 of control groups; elsewhere than on Linux there is no limit.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MOUNTED = "sys/fs/cgroup"


@dataclass(frozen=True)
class ProcessorLimit:
    """Of one control group."""

    group: Path
    cores: float


def usable_cores(root: Path = Path("/")) -> int:
    """So many threads at once are worth it; at least 1."""
    bound, limit = len(os.sched_getaffinity(0)), processor_limit(root)
    return bound if limit is None else max(1, min(bound, int(limit.cores)))


def processor_limit(root: Path = Path("/")) -> ProcessorLimit | None:
    """The tightest of the groups that this process is in; None: none of them has one."""
    limits = (_limit_of(folder) for folder in _groups(root))
    return min((each for each in limits if each), key=lambda limit: limit.cores, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """That of this process and those above it. In a container of its own name space its group is
    the topmost one; in others the path is the host's, of which only the end is there."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            mounted = root / _MOUNTED / ("cpu" if controllers else "")
            group = mounted / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mounted))


def _limit_of(group: Path) -> ProcessorLimit | None:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()  # of version 2
        return None if quota == "max" else ProcessorLimit(group, int(quota) / int(period))
    with suppress(OSError, ValueError):
        names = (f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        quota_us, period_us = (int((group / name).read_text()) for name in names)
        return ProcessorLimit(group, quota_us / period_us) if quota_us > 0 else None
    return None
