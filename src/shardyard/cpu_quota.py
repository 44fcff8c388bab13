"""Cores that this process may keep busy: those it is bound to, within its group's limit.

A container or a job step with a limit of processor time still sees all cores. Once its
processes have used the limit up, it pauses as a whole for the rest of the period (100 ms,
mostly). Version 1 and 2 of control groups are read; elsewhere than on Linux there is no
limit.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardyard.control_groups import groups_of


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
    limits = (_limit_of(folder) for folder in groups_of("cpu", root))
    return min((each for each in limits if each), key=lambda limit: limit.cores, default=None)


def _limit_of(group: Path) -> ProcessorLimit | None:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()  # of version 2
        return None if quota == "max" else ProcessorLimit(group, int(quota) / int(period))
    with suppress(OSError, ValueError):
        names = (f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        quota_us, period_us = (int((group / name).read_text()) for name in names)
        return ProcessorLimit(group, quota_us / period_us) if quota_us > 0 else None
    return None
