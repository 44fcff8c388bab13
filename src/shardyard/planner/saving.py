"""Seconds that saving a checkpoint takes: what training waits for, what is written behind it."""

CHECKPOINT_BYTES_PER_S = 1.2e9
"""Rate at which a node writes its part to shared storage: BLOOM-176B wrote 2.3 TB from 48 nodes in
40 s (bigscience-workshop/bigscience, tr11 chronicles)."""

STAGING_BYTES_PER_S = 10e9
"""Rate at which a device's state is copied to host memory while training waits: some 40 % of PCIe 4
in one direction."""


def blocking_s(nbytes: float, *, devices: int) -> float:
    """Training waits for the copy to host memory; each device copies its own part."""
    return nbytes / devices / STAGING_BYTES_PER_S


def writing_s(nbytes: float, *, nodes: int) -> float:
    """Behind training, each node writes its part."""
    return nbytes / nodes / CHECKPOINT_BYTES_PER_S
