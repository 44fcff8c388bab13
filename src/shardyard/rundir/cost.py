"""Cost of a run so far, from node 0's newest event of the kind `spent`."""

from dataclasses import dataclass
from typing import Any

from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Cost of all attempts together, at the prices of their plans."""

    usd: float
    usd_per_hour: float
    """Rate of the attempt that wrote it, all nodes together."""


def read_spending(run_dir: RunDir) -> Spending | None:
    """Return the newest count; None: no price was known, or no step has run yet."""
    event = _latest_spent_event(run_dir)
    if event is None:
        return None
    return Spending(usd=event["usd"], usd_per_hour=event["usd_per_hour"])


def seconds_since_count(run_dir: RunDir, attempt: int, *, now_t: float) -> float:
    """Return the time that the newest count of an attempt leaves out; 0: it has no count.

    Args:
        now_t: Unix seconds.
    """
    event = _latest_spent_event(run_dir)
    if event is None or event.get("attempt") != attempt:
        return 0.0
    return max(0.0, now_t - float(event["t"]))


def _latest_spent_event(run_dir: RunDir) -> dict[str, Any] | None:
    for event in read_lines_backwards(run_dir.events, with_any=('"spent"',)):
        numbers = event.get("usd"), event.get("usd_per_hour"), event.get("t")
        if event.get("kind") == "spent" and None not in numbers:
            return event
    return None
