"""Machines as the planner sees them: which devices, how many, and what joins them."""

from dataclasses import dataclass

from shardyard.hardware.accelerator import Accelerator as Accelerator
from shardyard.hardware.links import Link as Link


@dataclass(frozen=True, kw_only=True)
class Cluster:
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
    local_disk_bytes: int | None
    usd_per_node_hour: float | None
    """None: not known."""
    price_source: str

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all nodes."""
        return None if self.usd_per_node_hour is None else self.nodes * self.usd_per_node_hour
