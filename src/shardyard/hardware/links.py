"""Links between devices: the rate one device sees, in one direction, and the time of a small message.

Rates are the datasheets'; what a collective makes of them is the business of plan/collectives.py.
Latencies are what NCCL's own tuning model gives an all-reduce of two ranks in its LL protocol, ring:
6.6 us to start and 2 steps of 0.6 us over NVLink, 1.0 us over PCIe, 2.7 us over a network
(NVIDIA/nccl, src/graph/tuning.cc: baseLat and hwLat).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices, as one device sees it while all others use it too."""

    name: str
    """``NVLink 4``, ``4 x EFA``, ``PCIe 4``."""
    bytes_per_s: float
    """Datasheet rate of one direction for one device: its share where devices share a link."""
    latency_s: float
    """From the start of a collective of two devices to its end, for a small message."""
    source: str


NVLINK_LATENCY_S = (6.6 + 2 * 0.6) * 1e-6
PCIE_LATENCY_S = (6.6 + 2 * 1.0) * 1e-6
NETWORK_LATENCY_S = (6.6 + 2 * 2.7) * 1e-6

_NVIDIA_RATES = "both directions in NVIDIA's datasheet, halved"

NVLINK_2 = Link(
    name="NVLink 2", bytes_per_s=150e9, latency_s=NVLINK_LATENCY_S,
    source=f"V100: 6 links, 300 GB/s {_NVIDIA_RATES}",
)  # fmt: skip
NVLINK_3 = Link(
    name="NVLink 3", bytes_per_s=300e9, latency_s=NVLINK_LATENCY_S,
    source=f"A100: 12 links, 600 GB/s {_NVIDIA_RATES}",
)  # fmt: skip
NVLINK_4 = Link(
    name="NVLink 4", bytes_per_s=450e9, latency_s=NVLINK_LATENCY_S,
    source=f"H100: 18 links, 900 GB/s {_NVIDIA_RATES}",
)  # fmt: skip
NVLINK_5 = Link(
    name="NVLink 5", bytes_per_s=900e9, latency_s=NVLINK_LATENCY_S,
    source=f"B200: 18 links, 1.8 TB/s {_NVIDIA_RATES}",
)  # fmt: skip

# x16, one direction: 8, 16 and 32 GT/s a lane with 128 bits in 130 (PCI-SIG base specifications).
PCIE_3_BYTES_PER_S = 15.75e9
PCIE_4_BYTES_PER_S = 31.5e9
PCIE_5_BYTES_PER_S = 63e9


def pcie(generation: int) -> Link:
    """Sixteen lanes of PCIe 3, 4 or 5 for each device."""
    rates = {3: PCIE_3_BYTES_PER_S, 4: PCIE_4_BYTES_PER_S, 5: PCIE_5_BYTES_PER_S}
    return Link(
        name=f"PCIe {generation}",
        bytes_per_s=rates[generation],
        latency_s=PCIE_LATENCY_S,
        source=f"PCI Express base specification {generation}.0, x16",
    )


def infiniband(system: str, *, gbps_per_device: float, name: str) -> Link:
    """The network of a vendor's reference system.

    Args:
        system: What it is, for the source: ``DGX H100``.
        gbps_per_device: Gb/s of one direction, a device's share of its node's network.
        name: ``400 Gb/s InfiniBand``.
    """
    return Link(
        name=name,
        bytes_per_s=gbps_per_device / 8 * 1e9,
        latency_s=NETWORK_LATENCY_S,
        source=f"{system} datasheet",
    )
