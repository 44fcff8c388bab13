"""Accelerators of AMD, Intel, AWS and Google: one row each, from the sources named beside it."""

from shardyard.hardware.accelerator import GIB, Accelerator
from shardyard.hardware.nvidia import EC2_MEMORY, PEAKS

# MI300X and other AMD devices print their name through ROCm; Gaudi through habana_frameworks.
ROWS: tuple[Accelerator, ...] = (
    Accelerator(
        name="MI300X", memory_bytes=192 * GIB, bandwidth_bytes_per_s=5300e9,
        peak_tflops={"fp32": 163.4, "fp16": 1300, "bf16": 1300, "fp8": 2610},
        driver_names=(r"AMD Instinct MI300X",), source=PEAKS,
    ),
    Accelerator(
        name="Gaudi", memory_bytes=32 * GIB, driver_names=(r"GAUDI",),
        source=f"{EC2_MEMORY}; Intel publishes no peak",
    ),
    Accelerator(
        name="Gaudi2", memory_bytes=96 * GIB, bandwidth_bytes_per_s=2450e9,
        peak_tflops={"bf16": 432, "fp8": 865}, driver_names=(r"GAUDI2",), source=PEAKS,
    ),
    Accelerator(
        name="Gaudi3", memory_bytes=128 * GIB, bandwidth_bytes_per_s=3700e9,
        peak_tflops={"fp32": 229, "fp16": 459, "bf16": 1677, "fp8": 1677},
        driver_names=(r"GAUDI3",),
        source=f"{PEAKS}; memory and bandwidth: Intel Gaudi 3 white paper",
    ),
)  # fmt: skip
