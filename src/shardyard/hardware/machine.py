"""The devices of one machine, as a value."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What `python -m shardyard.parallel.device` printed about a machine."""

    device: str
    """What torch calls its kind: cpu, cuda (also ROCm), xpu, hpu, or a name of its vendor's."""
    name: str
    """The vendor's name of one device, or the CPU's."""
    count: int
    """Devices; for cpu: 1, as CPU processes are a choice and not a fact."""
    memory_bytes: int
    """Memory of one device; for cpu: of the machine, within the limit of its container."""
    cores: int
    """CPU cores of the machine, within the limit of its container."""
    hostname: str
    has_fp8: bool = False
    """Whether torchao's fp8 products run on its devices."""
    has_bf16: bool = True
    """Whether its devices multiply bf16 numbers: NVIDIA's from capability 8.0 on."""
