"""Capacity of instances: how they are rented (``cluster.capacity``), and a block's end.

All code reads it from here. It decides which nodes pods may take, the request of a launch
template, the longest time of a job, and when node 0 drains it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from shardyard.config.schema.recipe import Cluster
from shardyard.errors import Problem, RequestError
from shardyard.units import format_seconds

TERMINATED_BEFORE_S = 30 * 60
"""Seconds before its end when EC2 begins to terminate the instances of a capacity block.

Source: Amazon EC2 User Guide, Capacity Blocks for ML.
"""


@dataclass(frozen=True, kw_only=True)
class PurchaseOption:
    """Value of ``cluster.capacity``."""

    kind: Literal["on-demand", "spot", "reservation", "block"]
    id: str | None = None
    """Id of the capacity reservation; a block is one, too."""
    usable_until: float | None = None
    """Unix seconds: when a block's instances begin to go."""


def capacity_of(cluster: Cluster) -> PurchaseOption | None:
    """Return the requested capacity, from checked settings; None: there is no request."""
    if cluster.capacity is None:
        return None
    kind, _, number = cluster.capacity.partition(":")
    match kind:
        case "on-demand" | "spot":
            return PurchaseOption(kind=kind)
        case "reservation":
            return PurchaseOption(kind=kind, id=number)
        case "block":
            ends = _parse_timestamp(cluster.block_ends)
            assert ends is not None  # the check refuses a block without its end
            until = ends.timestamp() - TERMINATED_BEFORE_S
            return PurchaseOption(kind=kind, id=number, usable_until=until)
        case _:
            raise ValueError(cluster.capacity)


def block_remaining_s(cluster: Cluster, *, least_s: float, now: float) -> float | None:
    """Seconds for which the instances of a capacity block are there; None: they are in none.

    Args:
        least_s: Below which a run could not even save.
        now: Unix seconds.

    Raises:
        RequestError: Fewer are left.
    """
    capacity = capacity_of(cluster)
    if capacity is None or capacity.usable_until is None:
        return None
    left_s = capacity.usable_until - now
    if left_s <= least_s:
        state = "is over" if left_s <= 0 else f"is usable for {format_seconds(left_s)} more"
        raise RequestError(
            f"cluster.capacity={cluster.capacity} {state}: cluster.block_ends="
            f"{cluster.block_ends}, and EC2 begins to end its instances "
            f"{format_seconds(TERMINATED_BEFORE_S)} before. A run needs more than "
            f"{format_seconds(least_s)} of it, to drain. Name another block, or extend this one "
            "and give its new end."
        )
    return left_s


def check_capacity(cluster: Cluster) -> Iterable[Problem]:
    """Find capacity settings that contradict each other, or are not enough."""
    is_block = (cluster.capacity or "").startswith("block:")
    if cluster.capacity is not None and cluster.instance is None:
        text = (
            f"={cluster.capacity}, and cluster.instance names no EC2 type that would be rented so. "
            "Name it, or leave the capacity out."
        )
        yield Problem("cluster.capacity", text)
    if cluster.usd_per_node_hour is not None and cluster.instance is None and cluster.file is None:
        text = (
            f"={cluster.usd_per_node_hour:g}, and neither cluster.instance nor cluster.file names "
            "machines that would cost it. Name them, or leave the price out."
        )
        yield Problem("cluster.usd_per_node_hour", text)
    if is_block and cluster.block_ends is None:
        number = str(cluster.capacity).partition(":")[2]
        text = (
            "is not given, and the run must have drained when the block ends. `aws ec2 "
            f"describe-capacity-reservations --capacity-reservation-ids {number} --query "
            "'CapacityReservations[].EndDate'` prints it."
        )
        yield Problem("cluster.block_ends", text)
    if cluster.block_ends is None:
        return
    if not is_block:
        text = (
            f"={cluster.block_ends}, and cluster.capacity names no block that ends then. Write "
            "cluster.capacity=block:cr-..., or give a time limit with launch.time_limit."
        )
        yield Problem("cluster.block_ends", text)
    if _parse_timestamp(cluster.block_ends) is None:
        text = (
            f"={cluster.block_ends} is not a time with its time zone. Write it as EC2 prints it, "
            "such as 2027-01-31T11:30:00Z."
        )
        yield Problem("cluster.block_ends", text)


def _parse_timestamp(text: str | None) -> datetime | None:
    if text is None or not re.fullmatch(r"[0-9T:.Z+ -]{16,40}", text, re.ASCII):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if found.tzinfo is None else found.astimezone(UTC)


def reject_capacity_settings(cluster: Cluster, *, launcher: str, instead: str) -> None:
    """Reject a kind of rental where the launcher rents no nodes; a block's end counts anywhere.

    Raises:
        RequestError: Says what to do instead.
    """
    if cluster.capacity is None or cluster.capacity.startswith("block:"):
        return
    raise RequestError(
        f"cluster.capacity={cluster.capacity}, but on {launcher} the nodes exist already, and "
        f"their administrator has chosen how they are rented. Leave it out; {instead}."
    )
