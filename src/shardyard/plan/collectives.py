"""Seconds of one collective: a latency and a rate, by topology (alpha-beta).

A ring moves what must be moved at the rate of its slowest link and pays a hop per rank; across
nodes a tree pays a hop per doubling of nodes instead, at a little less rate. An all-reduce takes
the faster of the two, as NCCL does; the other collectives are rings.

The algorithms, what they count as hops inside and between nodes, and their relative rates are
those of NCCL's own cost model (NVIDIA/nccl, src/graph/tuning.cc); the links are the cluster's.
``docs/design/collectives.md`` sets them against measured tables.
"""

from dataclasses import dataclass
from math import ceil, log2

from shardyard.hardware.cluster import Cluster, Link

INSIDE_SHARE = 0.80
"""Bus rate that a collective reaches inside a node, of the datasheet's. NVLink 3: 235 of 300 GB/s
(what NCCL's model caps compute capability 8.0 at, src/graph/tuning.cc); NVLink 4: 370 of 450 GB/s
(S. Jeaugey of NCCL, NVIDIA/nccl-tests issue 212: about 20 % is protocol)."""

BETWEEN_SHARE = 0.84
"""The same between nodes. 4 x 100 Gb/s EFA of two p4d.24xlarge: 42.04 of 50 GB/s
(benchmarks/groundtruth/nccl_all_reduce_2x_p4d_4efa.csv)."""

TREE_SHARE = 0.92
"""Rate of NCCL's double binary tree, of its ring's (src/graph/tuning.cc, Simple protocol)."""

LAUNCH_S = 8.4e-6
"""What a collective costs before its first hop (base latency of a ring, Simple protocol, there)."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one collective."""

    size: int
    per_node: int
    """Members in one node (contiguous ranks); a size up to this never leaves the node."""


def hop_s(link: Link) -> float:
    """One hop: an all-reduce of two devices is its launch and two of them."""
    return max(0.0, link.latency_s - LAUNCH_S) / 2


def bus_bytes_per_s(group: Group, cluster: Cluster) -> float:
    """Rate at which a ring of the group passes data on.

    Between nodes each group has the network shares of its own members, because all groups of a node
    communicate at the same time.
    """
    inside = INSIDE_SHARE * cluster.inside.bytes_per_s
    if group.size <= group.per_node:
        return inside
    between = BETWEEN_SHARE * group.per_node * cluster.between.bytes_per_s
    return between if group.per_node == 1 else min(inside, between)


def all_reduce_s(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Sum over ranks; ``nbytes`` is the tensor on each rank."""
    size = group.size
    if size < 2 or nbytes <= 0:
        return 0.0
    rate = bus_bytes_per_s(group, cluster)
    ring = _ring_s(2, 2 * nbytes / rate, group, cluster)
    if size <= group.per_node:
        return ring
    inside = (group.per_node - 1) * hop_s(cluster.inside)
    between = ceil(log2(ceil(size / group.per_node))) * hop_s(cluster.between)
    tree = LAUNCH_S + 2 * (inside + between) + 2 * nbytes / (TREE_SHARE * rate)
    return min(ring, tree)


def all_gather_s(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Every rank gets the parts of all; ``nbytes`` is the gathered whole."""
    if group.size < 2 or nbytes <= 0:
        return 0.0
    return _ring_s(1, nbytes / bus_bytes_per_s(group, cluster), group, cluster)


def reduce_scatter_s(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Every rank gets its part of the sum; ``nbytes`` is the whole before."""
    return all_gather_s(nbytes, group, cluster)  # the same ring, backwards


def all_to_all_s(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Every rank sends a part to every other; ``nbytes`` is what each rank holds and deals out."""
    size, per_node = group.size, min(group.per_node, group.size)
    if size < 2 or nbytes <= 0:
        return 0.0
    inside = (per_node - 1) / size * nbytes / (INSIDE_SHARE * cluster.inside.bytes_per_s)
    if size <= per_node:
        return LAUNCH_S + hop_s(cluster.inside) + inside
    between = (size - per_node) / size * nbytes / (BETWEEN_SHARE * cluster.between.bytes_per_s)
    return LAUNCH_S + hop_s(cluster.between) + max(inside, between)


def send_s(nbytes: float, *, leaves_node: bool, cluster: Cluster) -> float:
    """From one device to another, while its neighbours in the node send too."""
    if nbytes <= 0:
        return 0.0
    link, share = (
        (cluster.between, BETWEEN_SHARE) if leaves_node else (cluster.inside, INSIDE_SHARE)
    )
    return LAUNCH_S + hop_s(link) + nbytes / (share * link.bytes_per_s)


def _ring_s(rounds: int, whole_s: float, group: Group, cluster: Cluster) -> float:
    """Launch, hops and transfer of ``rounds`` times around a ring.

    Args:
        whole_s: What the transfer would take if a rank sent its own part too.
    """
    size = group.size
    nodes = 1 if size <= group.per_node else ceil(size / group.per_node)
    hops = (size - nodes) * hop_s(cluster.inside) + (nodes - 1) * hop_s(cluster.between)
    return LAUNCH_S + rounds * hops + (size - 1) / size * whole_s
