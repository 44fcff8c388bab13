"""Seconds that saving a checkpoint takes: what training waits for, what is written behind it."""

from dataclasses import dataclass

CHECKPOINT_BYTES_PER_S = 1.2e9
"""Rate at which a node writes its part to shared storage: BLOOM-176B wrote 2.3 TB from 48 nodes in
40 s (bigscience-workshop/bigscience, tr11 chronicles)."""

STAGING_BYTES_PER_S = 10e9
"""Rate at which a device's state is copied to host memory while training waits: some 40 % of PCIe 4
in one direction."""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one checkpoint costs."""

    bytes: float
    """On disk, all ranks."""
    blocking_s: float
    """As long as training waits for it."""
    write_s: float
    """From then until it is durable; 0 where saving is synchronous."""

    @classmethod
    def of(cls, nbytes: float, *, devices: int, nodes: int) -> "SaveCost":
        """Training waits for the copy to host memory, which each device makes of its own part;
        behind it, each node writes its part."""
        return cls(
            bytes=nbytes,
            blocking_s=nbytes / devices / STAGING_BYTES_PER_S,
            write_s=nbytes / nodes / CHECKPOINT_BYTES_PER_S,
        )
