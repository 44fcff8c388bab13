"""What an instance costs an hour, by the way in which it is rented; with source and date.

One table for the planner, launches and clusters. What is in no row is not known and never guessed.
Savings plans and the spot price of a day are in none: `--prices aws` asks AWS for them, and
``cluster.usd_per_node_hour`` says what you really pay.
"""

from dataclasses import dataclass

from shardyard.hardware.catalogue import Instance

BLOCK_USD_PER_HOUR = {"p5e.48xlarge": 39.80, "p5en.48xlarge": 41.61}
"""Of one instance of a capacity block, most regions. AWS changes them every quarter or so, and what
counts is the price at the purchase; older ones, of other types, are left out."""
_BLOCK_SOURCE = "capacity block, paid when it is bought; AWS's table of January 2026"
# administraciondesistemas.com, "AWS encarece un 15% sus Capacity Blocks con NVIDIA H200" (2026-01)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """US dollars of one node and hour, and where that is from."""

    usd_per_hour: float | None
    """None: not known."""
    source: str
    """With its date; of one that is not known: why."""


def rate_of(machine: Instance, kind: str) -> Rate:
    """What an instance costs, rented so.

    Args:
        kind: ``on-demand``, ``spot``, ``reservation`` or ``block``.
    """
    on_demand = Rate(usd_per_hour=machine.usd_per_hour, source=machine.price_source)
    match kind:
        case "on-demand":
            return on_demand
        case "spot":
            return _at_most(on_demand)
        case "reservation":
            source = f"a reservation, which bills as on demand, used or not: {on_demand.source}"
            return Rate(usd_per_hour=on_demand.usd_per_hour, source=source)
        case "block":
            return _of_block(machine)
        case _:
            raise ValueError(kind)


def _at_most(on_demand: Rate) -> Rate:
    """Spot has a price of the day, and never one above that on demand (EC2 User Guide)."""
    source = f"at most: spot has a price of the day (--prices aws asks it); {on_demand.source}"
    return Rate(usd_per_hour=on_demand.usd_per_hour, source=source)


def _of_block(machine: Instance) -> Rate:
    usd = BLOCK_USD_PER_HOUR.get(machine.name)
    if usd is not None:
        return Rate(usd_per_hour=usd, source=_BLOCK_SOURCE)
    why = (
        f"no price of a capacity block of {machine.name} is in the table; AWS told it when the "
        "block was bought: give cluster.usd_per_node_hour"
    )
    return Rate(usd_per_hour=None, source=why)
