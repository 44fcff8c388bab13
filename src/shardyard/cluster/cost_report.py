"""Cost of a cluster's life: predicted in advance, and computed from its ledger.

The ledger says when each part was begun, seen and seen gone, and how many accelerator nodes
were requested. A part is paid from the moment it is begun to the moment it is seen gone: a few
minutes more than AWS bills, never less.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.cluster.prices import ACCELERATORS, BATCH_ENVIRONMENT, hourly_costs
from shardyard.cluster.spec import ClusterSpec
from shardyard.errors import StorageError
from shardyard.hardware.catalogue import Rate
from shardyard.launchers.ledger import Ledger

NODE_COUNT = "accelerator node count"
"""Kind of the ledger's notes that say how many are asked for from then on."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A while in which a cluster has the same number of accelerator nodes."""

    hours: float
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a bill."""

    what: str
    hours: float
    """Hours that it exists; for accelerator nodes, the sum over all of them."""
    usd: float | None
    """None: its price is not known."""


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Paid or predicted amount, without traffic, requests and disks of nodes."""

    items: tuple[Item, ...]

    @property
    def usd(self) -> float:
        """Sum of all items with a known price, US dollars."""
        return sum(item.usd or 0.0 for item in self.items)

    @property
    def is_whole(self) -> bool:
        """Whether each price is known."""
        return all(item.usd is not None for item in self.items)

    def words(self) -> str:
        """``$12.30``, or ``$12.30 and what is not known``."""
        return f"${self.usd:,.2f}" + ("" if self.is_whole else " and what is not known")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        items = [asdict(item) for item in self.items]
        return {"usd": self.usd, "is_whole": self.is_whole, "items": items}


@dataclass(frozen=True, kw_only=True)
class _Span:
    part: str
    hours: float
    count: int = 1


def predicted_bill(spec: ClusterSpec, stages: Sequence[Stage], *, rate: Rate | None = None) -> Bill:
    """Compute the bill of a cluster that exists through these stages, with all its parts.

    Args:
        rate: Price of an accelerator node an hour; None: the table's.
    """
    parts = {cost.part for cost in hourly_costs(spec, nodes=1)}
    spans = [
        _Span(part=part, hours=stage.hours, count=stage.nodes if part == ACCELERATORS else 1)
        for stage in stages
        for part in parts
    ]
    return _bill(spec, spans, rate)


def bill_of(spec: ClusterSpec, ledger: Ledger, *, now: float, rate: Rate | None = None) -> Bill:
    """Compute the bill of everything in the ledger, to this moment.

    Args:
        now: Unix seconds; parts that still exist are paid until then.
        rate: Price of an accelerator node an hour; None: the table's.

    Raises:
        StorageError: The ledger was changed by something else.
    """
    return _bill(spec, _spans(spec, ledger, now=now), rate)


def requested_nodes(spec: ClusterSpec, ledger: Ledger) -> int:
    """Accelerator nodes that are asked for now; 0: there is no group of them."""
    count = 0
    for _, part, number in _changes(spec, ledger):
        if part == ACCELERATORS:
            count = number
    return count


def _spans(spec: ClusterSpec, ledger: Ledger, *, now: float) -> Iterator[_Span]:
    """Yield how long each part existed; accelerator nodes have a span for each number of them."""
    stands: dict[str, tuple[float, int]] = {}
    for at, part, count in _changes(spec, ledger):
        since, before = stands.get(part, (at, 0))
        if before:
            yield _Span(part=part, hours=(at - since) / 3600, count=before)
        stands[part] = (at, count)
    for part, (since, count) in stands.items():
        yield _Span(part=part, hours=max(0.0, now - since) / 3600, count=count)


def _changes(spec: ClusterSpec, ledger: Ledger) -> Iterator[tuple[float, str, int]]:
    """When, which part, and how many of it there are from then on."""
    active: set[str] = set()
    for at, action, entry in ledger.history():
        if entry.kind == NODE_COUNT:
            yield at, ACCELERATORS, _count(entry.name, ledger)
            continue
        part = ACCELERATORS if entry.kind == BATCH_ENVIRONMENT else entry.kind
        if action in ("removed", "failed"):
            active.discard(part)
            yield at, part, 0
        elif part not in active:  # of one that was begun twice the first time counts
            active.add(part)
            yield at, part, spec.nodes.count if part == ACCELERATORS else 1


def _count(text: str, ledger: Ledger) -> int:
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII):
        raise StorageError(
            f"{ledger.path} says that {text} accelerator nodes were requested, which is not a "
            "number, so their cost is unknown. Restore the file from a copy."
        )
    return int(text)


def _bill(spec: ClusterSpec, spans: Iterable[_Span], rate: Rate | None) -> Bill:
    hours: dict[str, float] = {}
    for span in spans:
        hours[span.part] = hours.get(span.part, 0.0) + span.hours * span.count
    items = [
        Item(
            what=cost.what.removeprefix("1 x ") if cost.part == ACCELERATORS else cost.what,
            hours=hours[cost.part],
            usd=None if cost.usd_per_hour is None else hours[cost.part] * cost.usd_per_hour,
        )
        for cost in hourly_costs(spec, nodes=1, rate=rate)
        if hours.get(cost.part)
    ]
    return Bill(items=tuple(items))
