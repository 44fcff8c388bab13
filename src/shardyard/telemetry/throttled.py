"""How often this node's part of the run has used up its limit of processor time."""

from contextlib import suppress
from pathlib import Path

from shardyard.cpu_quota import processor_limit


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
