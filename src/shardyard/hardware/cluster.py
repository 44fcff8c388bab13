"""Machines as the planner sees them: which devices, how many, and what joins them."""

from dataclasses import dataclass, replace

from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import Instance
from shardyard.hardware.links import ALONE, Link, network, nvlink


@dataclass(frozen=True, kw_only=True)
class ClusterHardware:
    """Equal nodes with equal devices."""

    name: str
    """``p5.48xlarge``, the name in a cluster file, or ``this machine``."""
    accelerator: Accelerator
    devices_per_node: int
    nodes: int
    inside: Link
    """Joins the devices of one node (of one NVLink domain, where that is larger)."""
    between: Link
    """Joins nodes; the rate is one device's share of its node's network."""
    host_memory_bytes: int | None
    """Memory of one node; None: not known."""
    local_disk_bytes: int | None
    """Local disk of one node; 0: it has none, None: not known."""
    usd_per_node_hour: float | None
    """None: not known."""
    price_source: str
    threads: int | None = None
    """Hardware threads of one node's host (vCPUs); None: not known."""

    @property
    def reach(self) -> int:
        """Devices that ``inside`` joins: those of a node, or of a larger NVLink domain."""
        domain = self.accelerator.nvlink_domain or 0
        return min(max(self.devices_per_node, domain), self.devices)

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all nodes."""
        return None if self.usd_per_node_hour is None else self.nodes * self.usd_per_node_hour


EFA_HOP_S = {"p4d": 75e-6, "p4de": 75e-6, "p5": 75e-6, "p5e": 75e-6, "p5en": 35e-6,
             "p6-b200": 35e-6, "p6-b300": 35e-6}  # fmt: skip
"""Seconds of a hop by family: what AWS's plugin tells NCCL (aws/aws-ofi-nccl, src/platform-aws)."""

WITHOUT_RDMA_HOP_S = 150e-6
"""Seconds of a hop of p3dn, whose adapters cannot reach the memory of its devices.

Also used for the types that the plugin does not list, and for TCP, without a published
figure.
"""

SOCKETS_GBPS = 2.38 / 0.9 * 8
"""Gb/s that a node reaches over TCP, if it has EFA that pods do not get.

It is the best that NCCL reached between two p4d.24xlarge without EFA, 2.38 GB/s (the table
of benchmarks/all_reduce_fit.py). Collectives reach 0.9 of a link. It is used for all types,
as no other figure is published.
"""

_NVLINKS = {
    "p3.8xlarge": nvlink(
        2, links=4, source="NVIDIA DGX-1 V100 white paper: 4 of 6 links stay in half a cube mesh"
    )
}
"""Instances that have fewer links between their devices than the vendor's system."""


def cluster_of(instance: Instance, nodes: int) -> ClusterHardware:
    """Return a cluster of ``nodes`` instances of one type.

    Raises:
        RequestError: Its accelerator's link is not known.
    """
    family = instance.name.partition(".")[0]
    hop_s = EFA_HOP_S.get(family, WITHOUT_RDMA_HOP_S) if instance.efa_count else WITHOUT_RDMA_HOP_S
    between = network(
        f"{instance.efa_count} x EFA" if instance.efa_count else "TCP",
        gbps=instance.network_gbps / instance.count,
        source=f"{instance.source}: {instance.network_gbps:g} Gb/s for {instance.count}",
        hop_s=hop_s,
    )
    inside = _NVLINKS.get(instance.name) or _inside(instance.accelerator, instance.count)
    return ClusterHardware(
        name=instance.name,
        accelerator=instance.accelerator,
        devices_per_node=instance.count,
        nodes=nodes,
        inside=inside,
        between=between,
        host_memory_bytes=instance.host_memory_bytes,
        local_disk_bytes=instance.local_disk_bytes,
        usd_per_node_hour=instance.usd_per_hour,
        price_source=instance.price_source,
        threads=instance.vcpus,
    )


def with_efa(cluster: ClusterHardware, instance: Instance, interfaces: int) -> ClusterHardware:
    """Nodes whose pods are given so many of their instance's EFA interfaces; 0: TCP instead."""
    asked = f"launch.kubernetes.efa={interfaces}, and {instance.name} has {instance.efa_count}"
    if interfaces == 0:
        link = network(
            "TCP",
            gbps=min(SOCKETS_GBPS, instance.network_gbps) / instance.count,
            source=f"{asked}: {SOCKETS_GBPS:.0f} Gb/s a node, measured of p4d.24xlarge",
            hop_s=WITHOUT_RDMA_HOP_S,
        )
        return replace(cluster, between=link)
    share = interfaces / instance.efa_count
    link = replace(
        cluster.between,
        name=f"{interfaces} x EFA",
        bytes_per_s=cluster.between.bytes_per_s * share,
        source=f"{asked}: {share * instance.network_gbps:g} of {instance.network_gbps:g} Gb/s",
    )
    return replace(cluster, between=link)


def default_cluster(
    accelerator: Accelerator, *, devices_per_node: int, nodes: int
) -> ClusterHardware:
    """Return nodes of the vendor's reference system, for a cluster with no other description.

    Raises:
        RequestError: Several devices or nodes, and no source gives what joins them.
    """
    if nodes > 1 and accelerator.network is None:
        raise RequestError(
            f"{nodes} nodes of {accelerator.name}: the catalogue knows no network for it, as its "
            "vendor has no reference system. Name an EC2 type with cluster.instance, or give the "
            "network in a file with cluster.file."
        )
    return ClusterHardware(
        name=f"{devices_per_node} x {accelerator.name}",
        accelerator=accelerator,
        devices_per_node=devices_per_node,
        nodes=nodes,
        inside=_inside(accelerator, devices_per_node),
        between=accelerator.network or ALONE,
        host_memory_bytes=None,
        local_disk_bytes=None,
        usd_per_node_hour=None,
        price_source="no price: the machines are not named",
    )


def _inside(accelerator: Accelerator, devices: int) -> Link:
    if accelerator.link is not None:
        return accelerator.link
    if devices == 1:
        return ALONE
    raise RequestError(
        f"{devices} x {accelerator.name} in a node: the catalogue knows no link between them "
        f"({accelerator.source}). Give inside_gb_per_s in a file with cluster.file."
    )
