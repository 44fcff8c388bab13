"""Problems of nodes and devices, in words, from the run's events."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.report.run_data import Line, RunRecord
from shardyard.report.timeline import describe
from shardyard.rundir.telemetry import nodes_with_telemetry
from shardyard.units import format_seconds

_MOST = 12
_JUDGED = {"straggler": ("rank", "node", "what"), "slow_link": ("ranks",)}
"""Kinds that the judge of ranks tells -> what names the same rank or link in its next event."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The verdict."""

    problems: tuple[str, ...]
    """In a line each, the oldest first; those that are over say so."""
    watched_nodes: int
    """Nodes whose telemetry is in the folder."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def words(self) -> str:
        """In one sentence."""
        count = len(self.problems)
        if count:
            return f"{count} thing{'' if count == 1 else 's'} to look at."
        if not self.watched_nodes:
            return "No faults were found; no node wrote telemetry (observe.telemetry_every_s)."
        nodes = "one node" if self.watched_nodes == 1 else f"{self.watched_nodes} nodes"
        return f"Healthy: {nodes} watched, no faults."


def health_of(record: RunRecord) -> Health:
    """Return the problems that a run's events report; the newest dozen of many."""
    begun = record.attempts[0].events[0]["t"] if record.attempts[0].events else 0.0
    events = [event for attempt in record.attempts for event in attempt.events]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, event in enumerate(events):
        if _is_problem(event):
            alike.setdefault(_grouping_key(event), []).append(number)
    told = [
        f"{describe(events[first])}{_more(len(more))}, from {_since(events[first], begun)} on"
        f"{_until(events[first], events[first:], begun)}"
        for first, *more in alike.values()
    ]
    limits = [
        str(event["reason"])
        for kind in ("router_collapsed", "data_limit", "callback_failed")
        for event in record.all(kind)[-1:]
        if "reason" in event
    ]
    return Health(
        problems=(*told[-_MOST:], *limits), watched_nodes=len(nodes_with_telemetry(record.run))
    )


def _grouping_key(event: Line) -> tuple[Any, ...]:
    """Equal for ranks of one node that became slow in the same step, which are said in one line."""
    if event["kind"] != "straggler":
        return (id(event),)
    return tuple(event.get(key) for key in ("attempt", "generation", "node", "step", "what"))


def _more(ranks: int) -> str:
    return f" (and {ranks} more rank{'' if ranks == 1 else 's'} there)" if ranks else ""


def _is_problem(event: Line) -> bool:
    if event["kind"] in _JUDGED:
        return not event.get("is_over")
    return event["kind"] in ("device_problem", "program_error", "node_left_out")


def _until(event: Line, later: Sequence[Line], started_t: float) -> str:
    """When it was over, if it was."""
    same = _JUDGED.get(event["kind"], ("node_rank", "device", "problem"))
    end = event["kind"] if event["kind"] in _JUDGED else "device_well"
    for other in later:
        is_end = other["kind"] == end and (end == "device_well" or other.get("is_over"))
        if is_end and all(other.get(key) == event.get(key) for key in same):
            return f" until {_since(other, started_t)}"
    return ""


def _since(event: Line, started_t: float) -> str:
    return format_seconds(max(0.0, event["t"] - started_t))
