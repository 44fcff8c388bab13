"""Seconds of one collective: a latency and a rate, by topology (alpha-beta).

A ring moves what must be moved at the rate of its slowest link and pays a hop for each rank;
across nodes a tree pays a hop for each doubling of nodes instead, at a little less rate. An
all-reduce takes the faster of the two, as NCCL does; gathers and scatters are rings, an all-to-all
is sends.

Which hops an algorithm counts inside and between nodes, and the rate of the tree against the ring,
are those of NCCL's own cost model (NVIDIA/nccl, src/graph/tuning.cc); rates and latencies are the
cluster's. ``internals/collectives.md`` sets all of it against measurements.
"""

from dataclasses import dataclass

from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import START_S, Link, latency_of

INSIDE_SHARE = 0.80
"""Bus rate that collectives reach inside a node, of the datasheet's. NVLink 3: 231 of 300 GB/s
(NVIDIA/nccl issue 527; NCCL's model caps A100 at 235); NVLink 4: 365 to 370 of 450 GB/s for rings
of 2 to 8 (NVIDIA/nccl issue 1455; nccl-tests issue 212: about 20 % is protocol)."""

PCIE_SHARE = 0.45
"""The same over PCIe, where all flows cross the host's memory in both directions: 8 x RTX 5090, 28
of 63 GB/s (NVIDIA/nccl issue 1639)."""

BETWEEN_SHARE = 0.90
"""The same between nodes. 4 x 100 Gb/s EFA: 42 of 50 GB/s (the table that
benchmarks/all_reduce_fit.py fits); 4 x 200 Gb/s InfiniBand: 96 of 100 GB/s (nccl-tests issue 119);
400 Gb/s: 46 to 48 of 50 GB/s a card (nccl-tests issue 290)."""

TREE_SHARE = 0.92
"""Rate of the double binary tree, of the ring's (src/graph/tuning.cc)."""

HOP_SHARE = 0.5
"""Time of a hop, of a link's. A link's is that of NCCL's Simple protocol, which hands on whole
chunks; up to some MiB NCCL takes LL128, whose hops are 0.56 of that over NVLink, 0.44 over PCIe and
0.29 over a network (src/graph/tuning.cc). With half of it 2 x 8 ranks over InfiniBand take 46 us
before the first byte (47 on H20: NVIDIA/nccl issue 1244) and 16 x 8 take 88 (62 on H100: issue
1469)."""

SENDS_AT_ONCE = 8
"""Peers that a device serves at a time (NCCL_MAX_DEV_WORK_P2P_PER_BATCH, src/include/device.h)."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one collective. Its like in the same nodes communicate at the same time."""

    size: int
    per_node: int
    """Members in one node; a size up to this never leaves the node."""

    @property
    def nodes(self) -> int:
        """Nodes it reaches."""
        return -(-self.size // self.per_node)


def hop_s(link: Link) -> float:
    """One hop. The link's latency is an all-reduce of two devices: the start and two hops."""
    return HOP_SHARE * (link.latency_s - START_S) / 2 if link.latency_s > START_S else 0.0


def latency_with(hop_s: float) -> float:
    """The latency of a link whose hops take so long: ``hop_s`` the other way round."""
    return latency_of(hop_s / HOP_SHARE)


def inside_bytes_per_s(link: Link) -> float:
    """Rate that collectives reach over a link inside a node."""
    return (PCIE_SHARE if link.name[:4] == "PCIe" else INSIDE_SHARE) * link.bytes_per_s


def bus_bytes_per_s(group: Group, cluster: ClusterHardware) -> float:
    """Rate at which a ring passes data on.

    Out of a node it has the network shares of the group's own members there: all groups of a node
    communicate at the same time.
    """
    inside = inside_bytes_per_s(cluster.inside)
    if group.size <= group.per_node:
        return inside
    between = BETWEEN_SHARE * group.per_node * cluster.between.bytes_per_s
    # A ring with one member in each node never passes over the link inside.
    return between if group.per_node == 1 else min(inside, between)


def all_reduce_s(nbytes: float, group: Group, cluster: ClusterHardware) -> float:
    """Every rank gets the sum; ``nbytes`` is the tensor on each rank."""
    if group.size < 2 or nbytes <= 0:
        return 0.0
    rate = bus_bytes_per_s(group, cluster)
    moved = (group.size - 1) / group.size * nbytes
    # On a ring an all-reduce is a reduce-scatter followed by an all-gather.
    ring = START_S + 2 * (_ring_hops_s(group, cluster) + moved / rate)
    # Inside one node NCCL's tree is a chain with as many hops as the ring, at a lower rate.
    if group.size <= group.per_node:
        return ring
    # The tree sends the whole tensor up and down, the ring only (n - 1) / n of it each time.
    tree = START_S + 2 * (tree_hops_s(group, cluster) + nbytes / (TREE_SHARE * rate))
    return min(ring, tree)


def all_gather_s(nbytes: float, group: Group, cluster: ClusterHardware) -> float:
    """Every rank gets the parts of all; ``nbytes`` is the gathered whole."""
    if group.size < 2 or nbytes <= 0:
        return 0.0
    moved = (group.size - 1) / group.size * nbytes
    return START_S + _ring_hops_s(group, cluster) + moved / bus_bytes_per_s(group, cluster)


def reduce_scatter_s(nbytes: float, group: Group, cluster: ClusterHardware) -> float:
    """Every rank gets its part of the sum; ``nbytes`` is the whole before."""
    return all_gather_s(nbytes, group, cluster)  # the same ring, turned round


def all_to_all_s(nbytes: float, group: Group, cluster: ClusterHardware) -> float:
    """Every rank sends a part to every other; ``nbytes`` is what each rank holds and deals out.

    What leaves the node leaves over the device's own share of the network.
    """
    size = group.size
    if size < 2 or nbytes <= 0:
        return 0.0
    part = nbytes / size
    neighbours = min(size, group.per_node) - 1
    inside_s = neighbours * part / inside_bytes_per_s(cluster.inside)
    between_s = (size - 1 - neighbours) * part / (BETWEEN_SHARE * cluster.between.bytes_per_s)
    link = cluster.inside if size <= group.per_node else cluster.between
    rounds = -(-(size - 1) // SENDS_AT_ONCE)
    # The link inside and the network carry data at the same time: the slower one counts.
    return START_S + rounds * hop_s(link) + max(inside_s, between_s)


def deduplicated_dispatch_s(
    nbytes: float, experts_per_token: int, group: Group, cluster: ClusterHardware
) -> float:
    """Tokens to the ranks of their experts, each copied once to a node and once to a rank of it.

    A plain all-to-all sends a copy for each expert. Source: deepseek-ai/DeepEP, README.md
    (``dispatch`` and ``combine``); routers are taken to choose evenly.

    Args:
        nbytes: All tokens of a rank, once.
        experts_per_token: Experts of a token.
    """
    size = group.size
    if size < 2 or nbytes <= 0:
        return 0.0

    def others(groups: int) -> float:
        """Return the number of other groups that a token is copied to."""
        return (groups - 1) * (1 - (1 - 1 / groups) ** experts_per_token) if groups > 1 else 0.0

    nodes, near = group.nodes, min(size, group.per_node)
    # What arrives in a node is handed on to the ranks there.
    spread = others(size) - others(nodes)
    inside_s = nbytes * max(0.0, spread) / inside_bytes_per_s(cluster.inside) if near > 1 else 0.0
    between_s = nbytes * others(nodes) / (BETWEEN_SHARE * cluster.between.bytes_per_s)
    link = cluster.inside if nodes == 1 else cluster.between
    return START_S + hop_s(link) + max(inside_s, between_s)


def send_s(nbytes: float, *, leaves_node: bool, cluster: ClusterHardware) -> float:
    """From one device to another, while its neighbours in the node send too."""
    if nbytes <= 0:
        return 0.0
    if leaves_node:
        rate = BETWEEN_SHARE * cluster.between.bytes_per_s
        return START_S + hop_s(cluster.between) + nbytes / rate
    return START_S + hop_s(cluster.inside) + nbytes / inside_bytes_per_s(cluster.inside)


def tree_hops_s(group: Group, cluster: ClusterHardware) -> float:
    """Latency once up the tree: a chain through the node, then a doubling of nodes a hop."""
    doublings = (group.nodes - 1).bit_length()
    return (group.per_node - 1) * hop_s(cluster.inside) + doublings * hop_s(cluster.between)


def _ring_hops_s(group: Group, cluster: ClusterHardware) -> float:
    """Latency once around the ring, but for the last rank."""
    nodes = group.nodes
    inside = (group.size - nodes) * hop_s(cluster.inside)
    return inside if nodes == 1 else inside + (nodes - 1) * hop_s(cluster.between)
