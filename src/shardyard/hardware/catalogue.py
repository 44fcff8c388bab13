"""Catalogue of accelerators and EC2 instances: peak rates, memory, prices, a source per row.

A device is found by the exact name its driver prints. Any other name is unknown, and no
part of it is matched: "NVIDIA H200 NVL" is another part than "NVIDIA H200", and a MIG slice
is a part of one.
"""

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from shardyard.errors import RequestError
from shardyard.hardware import nvidia, other_vendors
from shardyard.hardware.accelerator import GIB, Accelerator


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance type."""

    name: str
    accelerator: Accelerator
    count: int
    """Accelerators in one instance."""
    efa_count: int
    """Elastic Fabric Adapters; 0: the network is reached by TCP."""
    network_gbps: float
    """One direction, all adapters; what is guaranteed, not the burst of small types."""
    vcpus: int
    host_memory_bytes: int
    local_disk_bytes: int
    """NVMe disks that are lost with the instance."""
    usd_per_hour: float | None
    """On demand, Linux, us-east-1; None: no price was found there."""

    @property
    def price_source(self) -> str:
        """Return the kind of price and the day it was read; printed wherever the price is."""
        return _PRICES

    @property
    def source(self) -> str:
        """Return the source of everything but the price."""
        return TABLE_SOURCE


class _Row(NamedTuple):
    accelerator: str
    accelerators: int
    efa_count: int
    network_gbps: float
    vcpus: int
    host_gib: int
    disk_gb: int
    usd_per_hour: float | None


_PRICES = "on-demand, us-east-1, karpenter.sh price table generated 2026-07-20"
TABLE_SOURCE = (
    "EC2 instance table of karpenter.sh, 2026-08-21 (p3 and dl1 from its version 1.12, the last to "
    "hold them)"
)

ACCELERATORS: tuple[Accelerator, ...] = (*nvidia.ROWS, *other_vendors.ROWS)

_BY_NAME = {row.name: row for row in ACCELERATORS}

# Type: accelerator, how many, EFA, Gb/s, vCPUs, host GiB, NVMe GB, USD an hour.
_INSTANCES: dict[str, _Row] = {
    "p3.2xlarge": _Row("V100 16GB", 1, 0, 2.5, 8, 61, 0, 3.06),
    "p3.8xlarge": _Row("V100 16GB", 4, 0, 10, 32, 244, 0, 12.24),
    "p3.16xlarge": _Row("V100 16GB", 8, 0, 25, 64, 488, 0, 24.48),
    "p3dn.24xlarge": _Row("V100 32GB", 8, 1, 100, 96, 768, 1800, 31.212),
    "p4d.24xlarge": _Row("A100 40GB", 8, 4, 400, 96, 1152, 8000, 21.957642),
    "p4de.24xlarge": _Row("A100 80GB", 8, 4, 400, 96, 1152, 8000, 27.44705),
    "p5.4xlarge": _Row("H100 SXM", 1, 1, 100, 16, 256, 3800, 6.88),
    "p5.48xlarge": _Row("H100 SXM", 8, 32, 3200, 192, 2048, 30400, 55.04),
    "p5e.48xlarge": _Row("H200", 8, 32, 3200, 192, 2048, 30400, None),
    "p5en.48xlarge": _Row("H200", 8, 16, 3200, 192, 2048, 30400, 63.296),
    "p6-b200.48xlarge": _Row("B200", 8, 8, 3200, 192, 2048, 30400, 113.9328),
    "p6-b300.48xlarge": _Row("B300", 8, 16, 6400, 192, 4096, 30400, 142.416),
    "dl1.24xlarge": _Row("Gaudi", 8, 4, 400, 96, 768, 4000, 13.10904),
    "trn1.2xlarge": _Row("Trainium1", 1, 0, 3.125, 8, 32, 474, 1.34375),
    "trn1.32xlarge": _Row("Trainium1", 16, 8, 800, 128, 512, 7600, 21.50),
    "trn1n.32xlarge": _Row("Trainium1", 16, 16, 1600, 128, 512, 7600, 24.78),
    "trn2.48xlarge": _Row("Trainium2", 16, 16, 3200, 192, 2048, 7600, None),
    "g4dn.xlarge": _Row("T4", 1, 0, 5, 4, 16, 125, 0.526),
    "g4dn.8xlarge": _Row("T4", 1, 1, 50, 32, 128, 900, 2.176),
    "g4dn.12xlarge": _Row("T4", 4, 1, 50, 48, 192, 900, 3.912),
    "g4dn.metal": _Row("T4", 8, 1, 100, 96, 384, 1800, 7.824),
    "g5.xlarge": _Row("A10G", 1, 0, 2.5, 4, 16, 250, 1.006),
    "g5.2xlarge": _Row("A10G", 1, 0, 5, 8, 32, 450, 1.212),
    "g5.8xlarge": _Row("A10G", 1, 1, 25, 32, 128, 900, 2.448),
    "g5.12xlarge": _Row("A10G", 4, 1, 40, 48, 192, 3800, 5.672),
    "g5.48xlarge": _Row("A10G", 8, 1, 100, 192, 768, 7600, 16.288),
    "g6.xlarge": _Row("L4", 1, 0, 2.5, 4, 16, 250, 0.8048),
    "g6.8xlarge": _Row("L4", 1, 1, 25, 32, 128, 900, 2.0144),
    "g6.12xlarge": _Row("L4", 4, 1, 40, 48, 192, 3760, 4.6016),
    "g6.48xlarge": _Row("L4", 8, 1, 100, 192, 768, 7520, 13.3504),
    "g6e.xlarge": _Row("L40S", 1, 0, 2.5, 4, 32, 250, 1.861),
    "g6e.8xlarge": _Row("L40S", 1, 1, 25, 32, 256, 900, 4.52856),
    "g6e.12xlarge": _Row("L40S", 4, 1, 100, 48, 384, 3800, 10.49264),
    "g6e.48xlarge": _Row("L40S", 8, 4, 400, 192, 1536, 7600, 30.13118),
    "g7e.48xlarge": _Row("RTX PRO 6000", 8, 4, 1600, 192, 2048, 15200, 33.14432),
}


def accelerator_named(name: str) -> Accelerator | None:
    """The accelerator whose driver prints this name; None if no row names it (a CPU, too)."""
    for row in ACCELERATORS:
        if any(re.fullmatch(pattern, name) for pattern in row.driver_names):
            return row
    return None


def accelerator_by_name(name: str) -> Accelerator:
    """The accelerator whose row has this name; upper and lower case are the same.

    Raises:
        RequestError: The catalogue has no such row; the message names the nearest ones.
    """
    rows = {row.name.lower(): row for row in ACCELERATORS}
    row = rows.get(name.lower())
    if row is None:
        near = difflib.get_close_matches(name.lower(), rows, n=3, cutoff=0.5)
        names = ", ".join(rows[word].name for word in near or rows)
        hint = f"Nearest: {names}." if near else f"It has {names}."
        raise RequestError(
            f"accelerator {name!r} is not in the catalogue. {hint} Take one of them, or describe "
            "the device by its numbers in a cluster file."
        )
    return row


def instance(name: str) -> Instance:
    """The EC2 instance type of this name.

    Raises:
        RequestError: The catalogue has no such type; the message names the nearest ones.
    """
    row = _INSTANCES.get(name)
    if row is None:
        begun = [other for other in _INSTANCES if name and other.startswith(name.lower())]
        same = [
            other
            for other, each in _INSTANCES.items()
            if name and name.upper() in each.accelerator.upper().split()
        ]
        near = begun or same or difflib.get_close_matches(name, _INSTANCES, n=3, cutoff=0.6)
        hint = f"Did you mean {', '.join(near)}?" if near else f"It has {', '.join(_INSTANCES)}."
        raise RequestError(
            f"cluster.instance={name!r} is not in the catalogue of EC2 instances. "
            f"{hint} Take one of them, or leave cluster.instance out to use this machine."
        )
    return Instance(
        name=name,
        accelerator=_BY_NAME[row.accelerator],
        count=row.accelerators,
        efa_count=row.efa_count,
        network_gbps=row.network_gbps,
        vcpus=row.vcpus,
        host_memory_bytes=row.host_gib * GIB,
        local_disk_bytes=row.disk_gb * 10**9,
        usd_per_hour=row.usd_per_hour,
    )


def instance_names() -> tuple[str, ...]:
    """Every EC2 instance type of the catalogue."""
    return tuple(_INSTANCES)


# What an instance costs an hour, by the way in which it is rented; with source and date.
#
# One table for the planner, launches and clusters. What is in no row is not known and never
# guessed. Savings plans and the spot price of a day are in none: `--prices aws` asks AWS for them,
# and ``cluster.usd_per_node_hour`` says what you really pay.

BLOCK_USD_PER_HOUR = {
    "p4d.24xlarge": 11.80, "p4de.24xlarge": 17.71, "p5.48xlarge": 41.53, "p5e.48xlarge": 47.76,
    "p5en.48xlarge": 54.92, "p6-b200.48xlarge": 98.84, "p6-b300.48xlarge": 112.32,
}  # fmt: skip
"""Price of one instance of a capacity block in US regions: AWS's price of an accelerator, times 8.

AWS changes them every quarter or so, and the price at the purchase counts. A p5en costs a tenth
less in Europe and Asia.
"""
_BLOCK_SOURCE = (
    "capacity block in the US, paid when it is bought; AWS's table as of 2026-09-19 "
    "(aws.amazon.com/ec2/capacityblocks/pricing)"
)
# Read from that page in a public survey of GPU prices of 2026-09-19. Each price but p5's and p4's
# agrees with a second public log of the page (2026-06-19) and AWS's increase of 20 % in July 2026.


@dataclass(frozen=True, kw_only=True)
class Rate:
    """US dollars of one node and hour, and where that is from."""

    usd_per_hour: float | None
    """None: not known."""
    source: str
    """With its date; of one that is not known: why."""


def rate_of(machine: Instance, kind: str) -> Rate:
    """Return the price of an instance for a kind of capacity.

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
        f"the table has no price of a capacity block of {machine.name}; AWS showed it when the "
        "block was bought: give cluster.usd_per_node_hour"
    )
    return Rate(usd_per_hour=None, source=why)
