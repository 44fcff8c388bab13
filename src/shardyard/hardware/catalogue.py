"""What is known about accelerators and EC2 instances: peak rates, memory, prices, a source per row.

A device is found by the exact name its driver prints. A name that no row names is unknown: nothing
is guessed from a part of it ("NVIDIA H200 NVL" is another part than "NVIDIA H200", and a MIG slice
is a part of one).
"""

import difflib
import re
from dataclasses import dataclass, field

from shardyard.errors import RequestError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator model."""

    name: str
    memory_bytes: int
    peak_tflops: dict[str, float] = field(default_factory=dict)
    """Datasheet peak without sparsity, by number format; a missing format is not known."""
    bandwidth_bytes_per_s: float | None = None
    """Peak of the device's own memory."""
    driver_names: tuple[str, ...] = ()
    """Regular expressions; each must match the whole of the name that the driver prints."""
    source: str = ""
    """Where the rates and the memory come from."""

    def peak_flops_per_s(self, number_format: str) -> float | None:
        """Peak FLOP/s of one device in a format; None if no source gives it."""
        tflops = self.peak_tflops.get(number_format)
        return None if tflops is None else tflops * 1e12


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance type."""

    name: str
    accelerator: Accelerator
    count: int
    """Accelerators in one instance."""
    usd_per_hour: float | None
    """On demand, Linux, us-east-1; None: no price was found there."""

    @property
    def device(self) -> str:
        """Kind of its accelerators, as ``cluster.device`` names it."""
        return "hpu" if self.accelerator.name.startswith("Gaudi") else "cuda"

    @property
    def price_source(self) -> str:
        """What the price is and when it was read; printed wherever the price is."""
        return _PRICES


_PEAKS = (
    "vendors' datasheets, dense, as collected by stas00/ml-engineering "
    "(compute/accelerator/README.md @744d01e18; bandwidth @007447327)"
)
_EC2_MEMORY = "memory: EC2 instance table of karpenter.sh, 2026-08-21"
_PRICES = "on-demand, us-east-1, karpenter.sh price table generated 2026-07-20"
_V100 = (
    "NVIDIA V100 datasheet and Volta white paper WP-08608-001: 640 tensor cores x 128 FLOP a clock "
    "x 1.53 GHz (SXM2), 1.38 GHz (PCIe); no bf16"
)

# MI300X and other AMD devices print their name through ROCm; Gaudi through habana_frameworks.
ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator(
        name="V100 16GB", memory_bytes=16 * GIB, bandwidth_bytes_per_s=900e9,
        peak_tflops={"fp32": 15.7, "fp16": 125},
        driver_names=(r"Tesla V100-SXM2-16GB",), source=_V100,
    ),
    Accelerator(
        name="V100 32GB", memory_bytes=32 * GIB, bandwidth_bytes_per_s=900e9,
        peak_tflops={"fp32": 15.7, "fp16": 125},
        driver_names=(r"Tesla V100-SXM2-32GB(-LS)?",), source=_V100,
    ),
    Accelerator(
        name="V100 PCIe 16GB", memory_bytes=16 * GIB, bandwidth_bytes_per_s=900e9,
        peak_tflops={"fp32": 14, "fp16": 112},
        driver_names=(r"Tesla V100-PCIE-16GB",), source=_V100,
    ),
    Accelerator(
        name="A100 40GB", memory_bytes=40 * GIB, bandwidth_bytes_per_s=1555e9,
        peak_tflops={"fp32": 19.5, "fp16": 312, "bf16": 312},
        driver_names=(r"(NVIDIA )?A100-SXM4-40GB", r"(NVIDIA )?A100-PCIE-40GB"),
        source=f"{_PEAKS}; 40 GB bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="A100 80GB", memory_bytes=80 * GIB, bandwidth_bytes_per_s=2000e9,
        peak_tflops={"fp32": 19.5, "fp16": 312, "bf16": 312},
        driver_names=(r"(NVIDIA )?A100-SXM4-80GB", r"(NVIDIA )?A100 80GB PCIe"), source=_PEAKS,
    ),
    Accelerator(
        name="H100 SXM", memory_bytes=80 * GIB, bandwidth_bytes_per_s=3350e9,
        peak_tflops={"fp32": 67, "fp16": 989, "bf16": 989, "fp8": 1979},
        driver_names=(r"NVIDIA H100 80GB HBM3",), source=_PEAKS,
    ),
    Accelerator(
        name="H100 PCIe", memory_bytes=80 * GIB, bandwidth_bytes_per_s=2000e9,
        peak_tflops={"fp32": 51, "fp16": 756, "bf16": 756, "fp8": 1513},
        driver_names=(r"NVIDIA H100 PCIe",), source=_PEAKS,
    ),
    Accelerator(
        name="H200", memory_bytes=144384 * MIB, bandwidth_bytes_per_s=4800e9,
        peak_tflops={"fp32": 67, "fp16": 989, "bf16": 989, "fp8": 1979},
        driver_names=(r"NVIDIA H200",), source=f"{_PEAKS}; {_EC2_MEMORY}",
    ),
    Accelerator(
        name="B200", memory_bytes=183359 * MIB, bandwidth_bytes_per_s=8000e9,
        peak_tflops={"fp32": 80, "fp16": 2250, "bf16": 2250, "fp8": 4500},
        driver_names=(r"NVIDIA B200",), source=f"{_PEAKS}; {_EC2_MEMORY}",
    ),
    Accelerator(
        name="B300", memory_bytes=275040 * MIB,
        peak_tflops={"fp32": 80, "fp16": 2250, "bf16": 2250, "fp8": 4500},
        source=f"{_PEAKS}; {_EC2_MEMORY}; what its driver prints is not known to us",
    ),
    Accelerator(
        name="L4", memory_bytes=22888 * MIB, bandwidth_bytes_per_s=300e9,
        peak_tflops={"fp32": 30.3, "fp16": 121, "bf16": 121, "fp8": 242.5},
        driver_names=(r"NVIDIA L4",),
        source=f"NVIDIA L4 datasheet, half of its figures with sparsity; {_EC2_MEMORY}",
    ),
    Accelerator(
        name="L40S", memory_bytes=45776 * MIB, bandwidth_bytes_per_s=864e9,
        peak_tflops={"fp32": 91.6, "fp16": 362, "bf16": 362, "fp8": 733},
        driver_names=(r"NVIDIA L40S",), source=f"{_PEAKS}; {_EC2_MEMORY}",
    ),
    Accelerator(
        name="A10G", memory_bytes=22888 * MIB, bandwidth_bytes_per_s=600e9,
        driver_names=(r"NVIDIA A10G",),
        source=f"{_EC2_MEMORY}; its sources disagree on the peak (62.5 to 140 TFLOP/s): left out",
    ),
    Accelerator(
        name="T4", memory_bytes=16 * GIB, driver_names=(r"Tesla T4",),
        source=f"{_EC2_MEMORY}; peak not looked up",
    ),
    Accelerator(
        name="MI300X", memory_bytes=192 * GIB, bandwidth_bytes_per_s=5300e9,
        peak_tflops={"fp32": 163.4, "fp16": 1300, "bf16": 1300, "fp8": 2610},
        driver_names=(r"AMD Instinct MI300X",), source=_PEAKS,
    ),
    Accelerator(
        name="Gaudi", memory_bytes=32 * GIB, driver_names=(r"GAUDI",),
        source=f"{_EC2_MEMORY}; Intel publishes no peak",
    ),
    Accelerator(
        name="Gaudi2", memory_bytes=96 * GIB, bandwidth_bytes_per_s=2450e9,
        peak_tflops={"bf16": 432, "fp8": 865}, driver_names=(r"GAUDI2",), source=_PEAKS,
    ),
    Accelerator(
        name="Gaudi3", memory_bytes=128 * GIB, bandwidth_bytes_per_s=3700e9,
        peak_tflops={"fp32": 229, "fp16": 459, "bf16": 1677, "fp8": 1677},
        driver_names=(r"GAUDI3",),
        source=f"{_PEAKS}; memory and bandwidth: Intel Gaudi 3 white paper",
    ),
)  # fmt: skip

_BY_NAME = {row.name: row for row in ACCELERATORS}

# Type: accelerator, how many, USD an hour. Source: instance table of karpenter.sh, 2026-08-21 (p3
# and dl1 from its version 1.12, the last to hold them); prices as in _PRICES.
_INSTANCES: dict[str, tuple[str, int, float | None]] = {
    "p3.2xlarge": ("V100 16GB", 1, 3.06),
    "p3.8xlarge": ("V100 16GB", 4, 12.24),
    "p3.16xlarge": ("V100 16GB", 8, 24.48),
    "p3dn.24xlarge": ("V100 32GB", 8, 31.212),
    "p4d.24xlarge": ("A100 40GB", 8, 21.957642),
    "p4de.24xlarge": ("A100 80GB", 8, 27.44705),
    "p5.4xlarge": ("H100 SXM", 1, 6.88),
    "p5.48xlarge": ("H100 SXM", 8, 55.04),
    "p5e.48xlarge": ("H200", 8, None),
    "p5en.48xlarge": ("H200", 8, 63.296),
    "p6-b200.48xlarge": ("B200", 8, 113.9328),
    "p6-b300.48xlarge": ("B300", 8, 142.416),
    "dl1.24xlarge": ("Gaudi", 8, 13.10904),
    "g4dn.xlarge": ("T4", 1, 0.526),
    "g4dn.8xlarge": ("T4", 1, 2.176),
    "g4dn.12xlarge": ("T4", 4, 3.912),
    "g4dn.metal": ("T4", 8, 7.824),
    "g5.xlarge": ("A10G", 1, 1.006),
    "g5.2xlarge": ("A10G", 1, 1.212),
    "g5.8xlarge": ("A10G", 1, 2.448),
    "g5.12xlarge": ("A10G", 4, 5.672),
    "g5.48xlarge": ("A10G", 8, 16.288),
    "g6.xlarge": ("L4", 1, 0.8048),
    "g6.8xlarge": ("L4", 1, 2.0144),
    "g6.12xlarge": ("L4", 4, 4.6016),
    "g6.48xlarge": ("L4", 8, 13.3504),
    "g6e.xlarge": ("L40S", 1, 1.861),
    "g6e.8xlarge": ("L40S", 1, 4.52856),
    "g6e.12xlarge": ("L40S", 4, 10.49264),
    "g6e.48xlarge": ("L40S", 8, 30.13118),
}


def accelerator_named(name: str) -> Accelerator | None:
    """The accelerator whose driver prints this name; None if no row names it (a CPU, too)."""
    for row in ACCELERATORS:
        if any(re.fullmatch(pattern, name) for pattern in row.driver_names):
            return row
    return None


def instance(name: str) -> Instance:
    """The EC2 instance type of this name.

    Raises:
        RequestError: The catalogue has no such type; the message names the nearest ones.
    """
    row = _INSTANCES.get(name)
    if row is None:
        near = difflib.get_close_matches(name, _INSTANCES, n=3, cutoff=0.6)
        hint = f"Nearest: {', '.join(near)}." if near else f"It has {', '.join(_INSTANCES)}."
        raise RequestError(
            f"cluster.instance={name!r} is not in the catalogue of EC2 instances. "
            f"{hint} Take one of them, or leave cluster.instance out to use this machine."
        )
    accelerator, count, usd_per_hour = row
    return Instance(
        name=name,
        accelerator=_BY_NAME[accelerator],
        count=count,
        usd_per_hour=usd_per_hour,
    )
