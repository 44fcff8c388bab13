"""NVIDIA's accelerators: one row each, from the datasheets named beside it."""

from shardyard.hardware.accelerator import GIB, MIB, Accelerator
from shardyard.hardware.links import (
    NVLINK_2,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    PCIE_3_BYTES_PER_S,
    PCIE_4_BYTES_PER_S,
    PCIE_5_BYTES_PER_S,
    infiniband,
    pcie,
)

PEAKS = (
    "vendors' datasheets, dense, as collected by stas00/ml-engineering "
    "(compute/accelerator/README.md @744d01e18)"
)
EC2_MEMORY = "memory: EC2 instance table of karpenter.sh, 2026-08-21"
MEASURED = "best of many matrix products: stas00/ml-engineering (hardware_mamf_matmul.csv)"
_BY_RULE = "not measured there; taken from"

_V100 = (
    "NVIDIA V100 datasheet and Volta white paper WP-08608-001: 640 tensor cores x 128 FLOP a clock "
    "x 1.53 GHz (SXM2), 1.38 GHz (PCIe); no bf16"
)
_OLDER = f"{_BY_RULE} A100 SXM, the nearest part of its kind"
_DGX_V100 = infiniband(
    "DGX-1 and DGX-2 (4 x 100 Gb/s for 8, 8 x for 16)", gbps_per_device=50, name="100 Gb/s EDR / 2"
)
_DGX_A100 = infiniband("DGX A100", gbps_per_device=200, name="200 Gb/s HDR")
_DGX_H100 = infiniband("DGX H100", gbps_per_device=400, name="400 Gb/s NDR")
_DGX_H200 = infiniband("DGX H200", gbps_per_device=400, name="400 Gb/s NDR")
_DGX_B200 = infiniband("DGX B200", gbps_per_device=400, name="400 Gb/s NDR")

ROWS: tuple[Accelerator, ...] = (
    Accelerator(
        name="V100 16GB", memory_bytes=16 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        peak_tflops={"fp32": 15.7, "fp16": 125}, achievable={"fp32": 0.869, "fp16": 0.869},
        achievable_source=_OLDER, link=NVLINK_2, host_link_bytes_per_s=PCIE_3_BYTES_PER_S,
        network=_DGX_V100, driver_names=(r"Tesla V100-SXM2-16GB",), source=_V100,
    ),
    Accelerator(
        name="V100 32GB", memory_bytes=32 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        peak_tflops={"fp32": 15.7, "fp16": 125}, achievable={"fp32": 0.869, "fp16": 0.869},
        achievable_source=_OLDER, link=NVLINK_2, host_link_bytes_per_s=PCIE_3_BYTES_PER_S,
        network=_DGX_V100, driver_names=(r"Tesla V100-SXM2-32GB(-LS)?",), source=_V100,
    ),
    Accelerator(
        name="V100 PCIe 16GB", memory_bytes=16 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        peak_tflops={"fp32": 14, "fp16": 112}, achievable={"fp32": 0.811, "fp16": 0.811},
        achievable_source=f"{_BY_RULE} A100 PCIe", link=pcie(3),
        host_link_bytes_per_s=PCIE_3_BYTES_PER_S,
        driver_names=(r"Tesla V100-PCIE-16GB",), source=_V100,
    ),
    Accelerator(
        name="A100 40GB", memory_bytes=40 * GIB, bandwidth_bytes_per_s=1555e9, processors=108,
        peak_tflops={"fp32": 19.5, "fp16": 312, "bf16": 312},
        achievable={"fp32": 0.869, "fp16": 0.869, "bf16": 0.869}, achievable_source=MEASURED,
        link=NVLINK_3, host_link_bytes_per_s=PCIE_4_BYTES_PER_S, network=_DGX_A100,
        driver_names=(r"(NVIDIA )?A100-SXM4-40GB", r"(NVIDIA )?A100-PCIE-40GB"),
        source=f"{PEAKS}; bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="A100 80GB", memory_bytes=80 * GIB, bandwidth_bytes_per_s=2039e9, processors=108,
        peak_tflops={"fp32": 19.5, "fp16": 312, "bf16": 312},
        achievable={"fp32": 0.869, "fp16": 0.869, "bf16": 0.869}, achievable_source=MEASURED,
        link=NVLINK_3, host_link_bytes_per_s=PCIE_4_BYTES_PER_S, network=_DGX_A100,
        driver_names=(r"(NVIDIA )?A100-SXM4-80GB", r"(NVIDIA )?A100 80GB PCIe"),
        source=f"{PEAKS}; bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="H100 SXM", memory_bytes=80 * GIB, bandwidth_bytes_per_s=3350e9, processors=132,
        peak_tflops={"fp32": 67, "fp16": 989, "bf16": 989, "fp8": 1979},
        achievable={"fp32": 0.803, "fp16": 0.803, "bf16": 0.803, "fp8": 0.709},
        achievable_source=MEASURED, link=NVLINK_4, host_link_bytes_per_s=PCIE_5_BYTES_PER_S,
        network=_DGX_H100, driver_names=(r"NVIDIA H100 80GB HBM3",), source=PEAKS,
    ),
    Accelerator(
        name="H100 PCIe", memory_bytes=80 * GIB, bandwidth_bytes_per_s=2000e9, processors=114,
        peak_tflops={"fp32": 51, "fp16": 756, "bf16": 756, "fp8": 1513},
        achievable={"fp32": 0.803, "fp16": 0.803, "bf16": 0.803, "fp8": 0.709},
        achievable_source=f"{_BY_RULE} H100 SXM", link=pcie(5),
        host_link_bytes_per_s=PCIE_5_BYTES_PER_S,
        driver_names=(r"NVIDIA H100 PCIe",), source=PEAKS,
    ),
    Accelerator(
        name="H200", memory_bytes=144384 * MIB, bandwidth_bytes_per_s=4800e9, processors=132,
        peak_tflops={"fp32": 67, "fp16": 989, "bf16": 989, "fp8": 1979},
        achievable={"fp32": 0.803, "fp16": 0.803, "bf16": 0.803, "fp8": 0.734},
        achievable_source=MEASURED, link=NVLINK_4, host_link_bytes_per_s=PCIE_5_BYTES_PER_S,
        network=_DGX_H200, driver_names=(r"NVIDIA H200",), source=f"{PEAKS}; {EC2_MEMORY}",
    ),
    Accelerator(
        name="B200", memory_bytes=183359 * MIB, bandwidth_bytes_per_s=8000e9, processors=148,
        peak_tflops={"fp32": 80, "fp16": 2250, "bf16": 2250, "fp8": 4500},
        achievable={"fp32": 0.776, "fp16": 0.776, "bf16": 0.776, "fp8": 0.763},
        achievable_source=MEASURED, link=NVLINK_5, host_link_bytes_per_s=PCIE_5_BYTES_PER_S,
        network=_DGX_B200, driver_names=(r"NVIDIA B200",), source=f"{PEAKS}; {EC2_MEMORY}",
    ),
    Accelerator(
        name="B300", memory_bytes=275040 * MIB,
        peak_tflops={"fp32": 80, "fp16": 2250, "bf16": 2250, "fp8": 4500},
        source=f"{PEAKS}; {EC2_MEMORY}; what its driver prints is not known to us",
    ),
    Accelerator(
        name="L4", memory_bytes=22888 * MIB, bandwidth_bytes_per_s=300e9,
        peak_tflops={"fp32": 30.3, "fp16": 121, "bf16": 121, "fp8": 242.5},
        driver_names=(r"NVIDIA L4",),
        source=f"NVIDIA L4 datasheet, half of its figures with sparsity; {EC2_MEMORY}",
    ),
    Accelerator(
        name="L40S", memory_bytes=45776 * MIB, bandwidth_bytes_per_s=864e9,
        peak_tflops={"fp32": 91.6, "fp16": 362, "bf16": 362, "fp8": 733},
        driver_names=(r"NVIDIA L40S",), source=f"{PEAKS}; {EC2_MEMORY}",
    ),
    Accelerator(
        name="A10G", memory_bytes=22888 * MIB, bandwidth_bytes_per_s=600e9,
        driver_names=(r"NVIDIA A10G",),
        source=f"{EC2_MEMORY}; its sources disagree on the peak (62.5 to 140 TFLOP/s): left out",
    ),
    Accelerator(
        name="T4", memory_bytes=16 * GIB, driver_names=(r"Tesla T4",),
        source=f"{EC2_MEMORY}; peak not looked up",
    ),
)  # fmt: skip
