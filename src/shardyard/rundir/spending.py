"""What a run has cost so far, as node 0 wrote it down: the newest event of the kind `spent`."""

from dataclasses import dataclass

from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_lines_backwards


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Of all attempts together, at the prices of their plans."""

    usd: float
    usd_per_hour: float
    """Of the attempt that wrote it, all nodes together."""


def read_spending(run_dir: RunDir) -> Spending | None:
    """The newest count; None: no price was known, or nothing has run yet."""
    for event in read_lines_backwards(run_dir.events, with_any=('"spent"',)):
        usd, usd_per_hour = event.get("usd"), event.get("usd_per_hour")
        if event.get("kind") == "spent" and usd is not None and usd_per_hour is not None:
            return Spending(usd=usd, usd_per_hour=usd_per_hour)
    return None
