"""Prices of a cluster while no run trains on it: US dollars, dated, us-east-1.

The price of an instance is that of ``hardware/catalogue.py``, by which runs are planned too.
"""

from dataclasses import dataclass

from shardyard.cluster.eksctl import GROUP, SYSTEM_GROUP
from shardyard.cluster.spec import SYSTEM_USD_PER_HOUR, AdoptedCluster, ClusterSpec
from shardyard.hardware.catalogue import Rate, rate_of

HOURS_A_MONTH = 730.0

CONTROL_PLANE_USD_PER_HOUR = 0.10
"""EKS, a version in standard support (cloudburn.io/blog/amazon-eks-pricing, read off AWS's price
page in March 2026)."""

NAT_USD_PER_HOUR = 0.045 + 0.005
"""A NAT gateway of a new network and its address, without traffic
(cloudburn.io/blog/aws-nat-gateway-pricing, February 2026)."""

FSX_USD_PER_GB_MONTH = {125: 0.145}
"""PERSISTENT_2 on SSD by MB/s of a TiB (c3x.dev, aws_fsx_lustre_file_system, read 2026-11). The
price of faster ones was found nowhere and is not guessed."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One thing that costs."""

    what: str
    usd_per_hour: float | None
    """None: not known."""
    part: str
    """Kind of the part that brings it, as the ledger calls it."""
    source: str = ""
    """Source of an instance's price, or the reason why it is not known."""


ACCELERATORS = f"{GROUP} nodes"
"""The part whose cost depends on a number of nodes."""
BATCH_ENVIRONMENT = "batch environment"
"""Part that has them on AWS Batch: instances that run without a job."""


def fsx_usd_per_month(size_gib: int, mb_per_s_per_tib: int) -> float | None:
    """Return the price of a file system of this size, US dollars a month; None: not known."""
    rate = FSX_USD_PER_GB_MONTH.get(mb_per_s_per_tib)
    return None if rate is None else rate * size_gib


def hourly_costs(spec: ClusterSpec, *, nodes: int, rate: Rate | None = None) -> list[Cost]:
    """List each resource that costs while so many accelerator nodes run.

    Args:
        rate: Price of one of these nodes; None: the table's.
    """
    found = [] if spec.kind == "batch" else _of_eks(spec)
    if spec.vpc.id is None:
        part = _NETWORK if spec.kind == "batch" else _CLUSTER  # eksctl's stack has both
        found.append(Cost(what="NAT gateway", usd_per_hour=NAT_USD_PER_HOUR, part=part))
    if spec.storage.kind == "fsx":
        month = fsx_usd_per_month(spec.storage.size_gib, spec.storage.mb_per_s_per_tib)
        hour = None if month is None else month / HOURS_A_MONTH
        what = f"FSx for Lustre, {spec.storage.size_gib} GiB"
        found.append(Cost(what=what, usd_per_hour=hour, part=_FILES))
    if spec.storage.kind == "efs":
        found.append(Cost(what="EFS, by what is stored", usd_per_hour=None, part=_FILES))
    if nodes:
        found.append(_nodes(spec, nodes, rate or rate_of(spec.instance, spec.capacity.kind)))
    if isinstance(spec, AdoptedCluster):  # what was there before costs without us, too
        return [cost for cost in found if cost.part in spec.adds]
    return found


_CLUSTER, _FILES, _NETWORK = "control plane", "file system", "network"


def _of_eks(spec: ClusterSpec) -> list[Cost]:
    system = spec.system
    return [
        Cost(what="EKS control plane", usd_per_hour=CONTROL_PLANE_USD_PER_HOUR, part=_CLUSTER),
        Cost(
            what=f"{system.nodes} x {system.instance}",
            usd_per_hour=system.nodes * SYSTEM_USD_PER_HOUR[system.instance],
            part=f"{SYSTEM_GROUP} nodes",
        ),
    ]


def _nodes(spec: ClusterSpec, nodes: int, rate: Rate) -> Cost:
    usd = rate.usd_per_hour
    return Cost(
        what=f"{nodes} x {spec.instance.name}, {spec.capacity.kind}",
        usd_per_hour=None if usd is None else nodes * usd,
        part=ACCELERATORS,
        source=rate.source,
    )
