"""The limit of processor time of the control group that this node's part of the run is in.

A container or a job step with a limit stands still for the rest of each period (100 ms, mostly) in
which its processes have used it up, all at once; no clock and no share of busy cores shows that.
Version 1 and 2 of control groups; without a limit, or elsewhere than on Linux, nothing is known.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MOUNTED = "sys/fs/cgroup"


@dataclass(frozen=True)
class _Group:
    folder: Path
    cores: float


class ProcessorLimit:
    """The tightest of the groups that this process is in, which stays the same."""

    def __init__(self, root: Path = Path("/")) -> None:
        limited = [group for group in map(_limited, _folders(root)) if group is not None]
        self._group = min(limited, key=lambda group: group.cores, default=None)

    def read(self) -> dict[str, float | None]:
        """The limit in cores, periods so far in which there was anything to do, and those of them
        in which the limit was used up."""
        counts: dict[str, int] = {}
        if self._group is not None:
            with suppress(OSError, ValueError):
                for line in (self._group.folder / "cpu.stat").read_text().splitlines():
                    name, _, value = line.partition(" ")
                    counts[name] = int(value)
        return {
            "cpu_limit_cores": None if self._group is None else self._group.cores,
            "cpu_limit_periods": counts.get("nr_periods"),
            "cpu_throttled_periods": counts.get("nr_throttled"),
        }


def _folders(root: Path) -> Iterator[Path]:
    """Of the group of this process and those above it. In a container of its own name space its
    group is the topmost one; in others the path is the host's, of which only the end is there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / _MOUNTED / ("cpu" if controllers else "")
        group = mounted / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mounted))


def _limited(folder: Path) -> _Group | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()  # of version 2
        return None if quota == "max" else _Group(folder, int(quota) / int(period))
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us, period_us = (
            int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        return _Group(folder, quota_us / period_us) if quota_us > 0 else None
    return None
