"""What is known about accelerators and EC2 instances: peak rates, memory, prices, a source per row.

A device is found by the exact name its driver prints. A name that no row names is unknown: nothing
is guessed from a part of it ("NVIDIA H200 NVL" is another part than "NVIDIA H200", and a MIG slice
is a part of one).
"""

import difflib
import re
from dataclasses import dataclass

from shardyard.errors import RequestError
from shardyard.hardware import nvidia, other_vendors
from shardyard.hardware.accelerator import Accelerator as Accelerator


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance type."""

    name: str
    accelerator: Accelerator
    count: int
    """Accelerators in one instance."""
    usd_per_hour: float | None
    """On demand, Linux, us-east-1; None: no price was found there."""

    @property
    def device(self) -> str:
        """Kind of its accelerators, as ``cluster.device`` names it."""
        return "hpu" if self.accelerator.name.startswith("Gaudi") else "cuda"

    @property
    def price_source(self) -> str:
        """What the price is and when it was read; printed wherever the price is."""
        return _PRICES


_PRICES = "on-demand, us-east-1, karpenter.sh price table generated 2026-07-20"

ACCELERATORS: tuple[Accelerator, ...] = (*nvidia.ROWS, *other_vendors.ROWS)

_BY_NAME = {row.name: row for row in ACCELERATORS}

# Type: accelerator, how many, USD an hour. Source: instance table of karpenter.sh, 2026-08-21 (p3
# and dl1 from its version 1.12, the last to hold them); prices as in _PRICES.
_INSTANCES: dict[str, tuple[str, int, float | None]] = {
    "p3.2xlarge": ("V100 16GB", 1, 3.06),
    "p3.8xlarge": ("V100 16GB", 4, 12.24),
    "p3.16xlarge": ("V100 16GB", 8, 24.48),
    "p3dn.24xlarge": ("V100 32GB", 8, 31.212),
    "p4d.24xlarge": ("A100 40GB", 8, 21.957642),
    "p4de.24xlarge": ("A100 80GB", 8, 27.44705),
    "p5.4xlarge": ("H100 SXM", 1, 6.88),
    "p5.48xlarge": ("H100 SXM", 8, 55.04),
    "p5e.48xlarge": ("H200", 8, None),
    "p5en.48xlarge": ("H200", 8, 63.296),
    "p6-b200.48xlarge": ("B200", 8, 113.9328),
    "p6-b300.48xlarge": ("B300", 8, 142.416),
    "dl1.24xlarge": ("Gaudi", 8, 13.10904),
    "g4dn.xlarge": ("T4", 1, 0.526),
    "g4dn.8xlarge": ("T4", 1, 2.176),
    "g4dn.12xlarge": ("T4", 4, 3.912),
    "g4dn.metal": ("T4", 8, 7.824),
    "g5.xlarge": ("A10G", 1, 1.006),
    "g5.2xlarge": ("A10G", 1, 1.212),
    "g5.8xlarge": ("A10G", 1, 2.448),
    "g5.12xlarge": ("A10G", 4, 5.672),
    "g5.48xlarge": ("A10G", 8, 16.288),
    "g6.xlarge": ("L4", 1, 0.8048),
    "g6.8xlarge": ("L4", 1, 2.0144),
    "g6.12xlarge": ("L4", 4, 4.6016),
    "g6.48xlarge": ("L4", 8, 13.3504),
    "g6e.xlarge": ("L40S", 1, 1.861),
    "g6e.8xlarge": ("L40S", 1, 4.52856),
    "g6e.12xlarge": ("L40S", 4, 10.49264),
    "g6e.48xlarge": ("L40S", 8, 30.13118),
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
        near = difflib.get_close_matches(name, _INSTANCES, n=3, cutoff=0.6)
        hint = f"Nearest: {', '.join(near)}." if near else f"It has {', '.join(_INSTANCES)}."
        raise RequestError(
            f"cluster.instance={name!r} is not in the catalogue of EC2 instances. "
            f"{hint} Take one of them, or leave cluster.instance out to use this machine."
        )
    accelerator, count, usd_per_hour = row
    return Instance(
        name=name,
        accelerator=_BY_NAME[accelerator],
        count=count,
        usd_per_hour=usd_per_hour,
    )
