"""Links between devices: the rate that one device sees in one direction, and how long a hop takes.

Rates are the datasheets'; what a collective makes of them is planner/collectives.py's business.
Latencies are those of NCCL's own cost model for large messages (NVIDIA/nccl, src/graph/tuning.cc,
ring, Simple protocol), which charges 8.4 us for the start and a hop of 3.4 us over NVLink, 5.7 us
over PCIe and 14 us over a network. An all-reduce of two devices has two hops.
"""

from dataclasses import dataclass

START_S = 8.4e-6
NVLINK_HOP_S = 3.4e-6
PCIE_HOP_S = 5.7e-6
NETWORK_HOP_S = 14e-6


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices, as one device sees it while all others use it too."""

    name: str
    """``NVLink 4``, ``4 x EFA``, ``PCIe 4``."""
    bytes_per_s: float
    """Datasheet rate of one direction for one device: its share where devices share a link."""
    latency_s: float
    """From the start of a collective of two devices to its end, for a small message."""
    source: str


def latency_of(hop_s: float) -> float:
    """Latency of a collective of two devices: the start and two hops."""
    return START_S + 2 * hop_s


NVLINK_LATENCY_S = latency_of(NVLINK_HOP_S)
PCIE_LATENCY_S = latency_of(PCIE_HOP_S)


def nvlink(generation: int, *, links: int, source: str) -> Link:
    """Return the link of ``links`` NVLinks from one device to its peers."""
    # One direction of one link: 25 GB/s in generations 2 to 4, 50 GB/s in 5 (NVIDIA datasheets
    # give both directions: V100 6 x 50, A100 12 x 50, H100 18 x 50, B200 18 x 100 GB/s).
    rate = 50e9 if generation == 5 else 25e9
    return Link(
        name=f"NVLink {generation}",
        bytes_per_s=links * rate,
        latency_s=NVLINK_LATENCY_S,
        source=source,
    )


NVLINK_2 = nvlink(2, links=6, source="NVIDIA V100 datasheet: 300 GB/s both ways")
NVLINK_3 = nvlink(3, links=12, source="NVIDIA A100 datasheet: 600 GB/s both ways")
NVLINK_4 = nvlink(4, links=18, source="NVIDIA H100 datasheet: 900 GB/s both ways")
NVLINK_5 = nvlink(5, links=18, source="NVIDIA DGX B200 datasheet: 1.8 TB/s both ways")

PCIE_BYTES_PER_S = {3: 15.75e9, 4: 31.5e9, 5: 63e9}
"""x16, one direction: 8, 16 and 32 GT/s a lane, 128 bits in 130 (PCI-SIG base specifications)."""


def pcie(generation: int) -> Link:
    """Sixteen lanes of PCIe 3, 4 or 5 for each device."""
    return Link(
        name=f"PCIe {generation}",
        bytes_per_s=PCIE_BYTES_PER_S[generation],
        latency_s=PCIE_LATENCY_S,
        source=f"PCI Express {generation}.0, x16",
    )


def direct(name: str, *, gb_per_s: float, source: str) -> Link:
    """Return a vendor's own link between devices, with NCCL's hop for PCIe: none is published."""
    return Link(name=name, bytes_per_s=gb_per_s * 1e9, latency_s=PCIE_LATENCY_S, source=source)


def network(name: str, *, gbps: float, source: str, hop_s: float = NETWORK_HOP_S) -> Link:
    """A network between nodes.

    Args:
        gbps: Gb/s of one direction, a device's share of its node's.
        hop_s: From a device of one node to a device of another.
    """
    return Link(name=name, bytes_per_s=gbps / 8 * 1e9, latency_s=latency_of(hop_s), source=source)


ALONE = Link(name="none", bytes_per_s=1e18, latency_s=0.0, source="nobody to send to")
"""Link that carries no traffic: inside a node of one device, between nodes if there is one."""
