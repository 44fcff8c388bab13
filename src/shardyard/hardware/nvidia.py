"""NVIDIA's accelerators: one row each, from the datasheets named next to it.

A part without a measurement takes the share of the peak that its nearest kin reached:
boards of the same package (SXM, PCIe), else of the same generation. A power limit decides
that share, and it is set by package and generation. Capabilities are those of NVIDIA's
list, developer.nvidia.com/cuda-gpus.
"""

from shardyard.hardware.accelerator import (
    GIB,
    HALVES,
    HALVES_AND_FP8,
    MIB,
    Accelerator,
    measured_efficiency,
    sibling_efficiency,
)
from shardyard.hardware.links import (
    NVLINK_2,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    PCIE_BYTES_PER_S,
    network,
    pcie,
)

PEAKS = (
    "vendors' datasheets, dense, as collected by stas00/ml-engineering "
    "(compute/accelerator/README.md @744d01e18)"
)
EC2_MEMORY = "memory: EC2 instance table of karpenter.sh, 2026-08-21"
MEASURED = "measured: best of many matrix products, stas00/ml-engineering @744d01e18"
C2C_BYTES_PER_S = 450e9
"""NVLink-C2C of a Grace Hopper, one direction (NVIDIA GH200 datasheet: 900 GB/s both ways)."""

_V100_SOURCE = (
    "NVIDIA V100 datasheet and Volta white paper WP-08608-001: 640 tensor cores x 128 FLOP a clock "
    "x 1.53 GHz (SXM2), 1.38 GHz (PCIe)"
)
_CUSTOM_H100 = (
    "pytorch/torchtitan, benchmarks: 96 GB HBM2e at 2.4 TB/s, 500 W, 400 Gb/s a device. No "
    "datasheet: the peak of H100 SXM, which torchtitan divides by too; its clock under load "
    "follows its power limit"
)

_V100 = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}
_A100 = {"fp32": 19.5, "fp16": 312.0, "bf16": 312.0}
_HOPPER = {"fp32": 67.0, "fp16": 989.0, "bf16": 989.0, "fp8": 1979.0}
_H100_PCIE = {"fp32": 51.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0}
_H100_NVL = {"fp32": 60.0, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_BLACKWELL = {"fp32": 80.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0}
_B200 = {**_BLACKWELL, "fp4": 9000.0}
_B300 = {**_BLACKWELL, "fp4": 12600.0}
_GRACE_BLACKWELL = {"fp32": 80.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0}
_GB200 = {**_GRACE_BLACKWELL, "fp4": 10000.0}
_GB300 = {**_GRACE_BLACKWELL, "fp4": 15000.0}
_L4 = {"fp32": 30.3, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5}
_L40S = {"fp32": 91.6, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0}
_T4 = {"fp32": 8.1, "fp16": 65.0}
_4090 = {"fp32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}
_A6000 = {"fp32": 38.7, "fp16": 154.8, "bf16": 154.8}
_PRO_6000 = {"fp32": 120.0, "fp16": 500.0, "bf16": 500.0, "fp8": 1000.0}

_A100_REACHED = measured_efficiency(_A100, bf16=271.2)
_A100_PCIE_REACHED = measured_efficiency(_A100, bf16=252.9)
_H100_REACHED = measured_efficiency(_HOPPER, bf16=794.5, fp8=1402.6)
_GB200_REACHED = measured_efficiency(_GB200, bf16=1822, fp8=3615.6)
_AS_A100 = "not measured; as A100 SXM, the oldest SXM board that was"
_AS_A100_PCIE = "not measured; as A100 PCIe, the only PCIe board that was"
_AS_H100 = "not measured; as H100 SXM, the same chip"

_DGX_V100 = network(
    "EDR InfiniBand", gbps=50, source="DGX-1 and DGX-2: 4 x 100 Gb/s for 8 devices, 8 x for 16"
)
_DGX_A100 = network("HDR InfiniBand", gbps=200, source="DGX A100 datasheet: 8 x 200 Gb/s")
_DGX_H100 = network("NDR InfiniBand", gbps=400, source="DGX H100 datasheet: 8 x 400 Gb/s")
_DGX_H200 = network("NDR InfiniBand", gbps=400, source="DGX H200 datasheet: 8 x 400 Gb/s")
_DGX_B200 = network("NDR InfiniBand", gbps=400, source="DGX B200 datasheet: 8 x 400 Gb/s")
_DGX_B300 = network("XDR InfiniBand", gbps=800, source="DGX B300 datasheet: 8 x 800 Gb/s")
_DGX_GH200 = network("NDR InfiniBand", gbps=400, source="DGX GH200 datasheet: 400 Gb/s each")
_NVL72 = network("NDR InfiniBand", gbps=400, source="DGX GB200 datasheet: 72 x 400 Gb/s")
_GB300_NVL72 = network("XDR InfiniBand", gbps=800, source="DGX GB300 datasheet: 72 x 800 Gb/s")
_GRAND_TETON = network("RoCE", gbps=400, source="pytorch/torchtitan, benchmarks: 400 Gb/s a device")

ROWS: tuple[Accelerator, ...] = (
    Accelerator(
        name="V100 16GB", memory_bytes=16 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        capability=(7, 0),
        peak_tflops=_V100, achievable=sibling_efficiency(_A100_REACHED, _V100),
        achievable_source=_AS_A100, link=NVLINK_2, host_link_bytes_per_s=PCIE_BYTES_PER_S[3],
        network=_DGX_V100, driver_names=(r"Tesla V100-SXM2-16GB",), source=_V100_SOURCE,
    ),
    Accelerator(
        name="V100 32GB", memory_bytes=32 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        capability=(7, 0),
        peak_tflops=_V100, achievable=sibling_efficiency(_A100_REACHED, _V100),
        achievable_source=_AS_A100, link=NVLINK_2, host_link_bytes_per_s=PCIE_BYTES_PER_S[3],
        network=_DGX_V100, driver_names=(r"Tesla V100-SXM2-32GB(-LS)?",), source=_V100_SOURCE,
    ),
    Accelerator(
        name="V100 PCIe 16GB", memory_bytes=16 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        capability=(7, 0),
        peak_tflops=_V100_PCIE, achievable=sibling_efficiency(_A100_PCIE_REACHED, _V100_PCIE),
        achievable_source=_AS_A100_PCIE, link=pcie(3), host_link_bytes_per_s=PCIE_BYTES_PER_S[3],
        driver_names=(r"Tesla V100-PCIE-16GB",), source=_V100_SOURCE,
    ),
    Accelerator(
        name="V100 PCIe 32GB", memory_bytes=32 * GIB, bandwidth_bytes_per_s=900e9, processors=80,
        capability=(7, 0),
        peak_tflops=_V100_PCIE, achievable=sibling_efficiency(_A100_PCIE_REACHED, _V100_PCIE),
        achievable_source=_AS_A100_PCIE, link=pcie(3), host_link_bytes_per_s=PCIE_BYTES_PER_S[3],
        driver_names=(r"Tesla V100-PCIE-32GB",), source=_V100_SOURCE,
    ),
    Accelerator(
        name="A100 40GB", memory_bytes=40 * GIB, bandwidth_bytes_per_s=1555e9, processors=108,
        capability=(8, 0),
        peak_tflops=_A100, achievable=_A100_REACHED, achievable_source=MEASURED,
        measured=HALVES,
        link=NVLINK_3, host_link_bytes_per_s=PCIE_BYTES_PER_S[4], network=_DGX_A100,
        driver_names=(r"(NVIDIA )?A100-SXM4-40GB",),
        source=f"{PEAKS}; bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="A100 80GB", memory_bytes=80 * GIB, bandwidth_bytes_per_s=2039e9, processors=108,
        capability=(8, 0),
        peak_tflops=_A100, achievable=_A100_REACHED, achievable_source=MEASURED,
        measured=HALVES,
        link=NVLINK_3, host_link_bytes_per_s=PCIE_BYTES_PER_S[4], network=_DGX_A100,
        driver_names=(r"(NVIDIA )?A100-SXM4-80GB",),
        source=f"{PEAKS}; bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="A100 PCIe 40GB", memory_bytes=40 * GIB, bandwidth_bytes_per_s=1555e9, processors=108,
        capability=(8, 0),
        peak_tflops=_A100, achievable=_A100_PCIE_REACHED, achievable_source=MEASURED,
        measured=HALVES,
        link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        driver_names=(r"(NVIDIA )?A100-PCIE-40GB",),
        source=f"{PEAKS}; bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="A100 PCIe 80GB", memory_bytes=80 * GIB, bandwidth_bytes_per_s=1935e9, processors=108,
        capability=(8, 0),
        peak_tflops=_A100, achievable=_A100_PCIE_REACHED, achievable_source=MEASURED,
        measured=HALVES,
        link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        driver_names=(r"(NVIDIA )?A100 80GB PCIe",),
        source=f"{PEAKS}; bandwidth: NVIDIA A100 datasheet",
    ),
    Accelerator(
        name="H100 SXM", memory_bytes=80 * GIB, bandwidth_bytes_per_s=3350e9, processors=132,
        capability=(9, 0),
        peak_tflops=_HOPPER, achievable=_H100_REACHED, achievable_source=MEASURED,
        measured=HALVES_AND_FP8,
        link=NVLINK_4, host_link_bytes_per_s=PCIE_BYTES_PER_S[5], network=_DGX_H100,
        driver_names=(r"NVIDIA H100 80GB HBM3",),
        source=f"{PEAKS}; bandwidth: NVIDIA H100 datasheet",
    ),
    Accelerator(
        name="H100 PCIe", memory_bytes=80 * GIB, bandwidth_bytes_per_s=2000e9, processors=114,
        capability=(9, 0),
        peak_tflops=_H100_PCIE, achievable=sibling_efficiency(_H100_REACHED, _H100_PCIE),
        achievable_source=_AS_H100, link=pcie(5), host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        driver_names=(r"NVIDIA H100 PCIe",),
        source=f"{PEAKS}; bandwidth: NVIDIA H100 datasheet",
    ),
    Accelerator(
        name="H100 NVL", memory_bytes=94 * GIB, bandwidth_bytes_per_s=3900e9, processors=132,
        capability=(9, 0),
        peak_tflops=_H100_NVL, achievable=sibling_efficiency(_H100_REACHED, _H100_NVL),
        achievable_source=_AS_H100, link=pcie(5), host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        driver_names=(r"NVIDIA H100 NVL",),
        source="NVIDIA H100 NVL datasheet (half of its sparse figures); its NVLink joins two "
        "boards only and is left out",
    ),
    Accelerator(
        name="H100 96GB HBM2e", memory_bytes=96 * GIB, bandwidth_bytes_per_s=2400e9,
        capability=(9, 0),
        processors=132, peak_tflops=_HOPPER, power_share=(500 / 700) ** 0.5,
        achievable=sibling_efficiency(_H100_REACHED, _HOPPER), achievable_source=_AS_H100,
        link=NVLINK_4, host_link_bytes_per_s=PCIE_BYTES_PER_S[5], network=_GRAND_TETON,
        source=_CUSTOM_H100,
    ),
    Accelerator(
        name="H200", memory_bytes=144384 * MIB, bandwidth_bytes_per_s=4800e9, processors=132,
        capability=(9, 0),
        peak_tflops=_HOPPER, achievable=measured_efficiency(_HOPPER, bf16=794.5, fp8=1453.4),
        achievable_source=MEASURED,
        measured=HALVES_AND_FP8, link=NVLINK_4, host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        network=_DGX_H200, driver_names=(r"NVIDIA H200",),
        source=f"{PEAKS}; bandwidth: NVIDIA H200 datasheet; {EC2_MEMORY}",
    ),
    Accelerator(
        name="GH200", memory_bytes=96 * GIB, bandwidth_bytes_per_s=4000e9, processors=132,
        capability=(9, 0),
        peak_tflops=_HOPPER, achievable=measured_efficiency(_HOPPER, bf16=828.6, fp8=1535),
        achievable_source=f"{MEASURED} (900 W, HBM3e)",
        measured=HALVES_AND_FP8, link=NVLINK_4,
        host_link_bytes_per_s=C2C_BYTES_PER_S, network=_DGX_GH200,
        driver_names=(r"NVIDIA GH200 480GB",),
        source=f"{PEAKS}; memory (the HBM3 version), bandwidth: NVIDIA GH200 datasheet",
    ),
    Accelerator(
        name="B200", memory_bytes=183359 * MIB, bandwidth_bytes_per_s=8000e9, processors=148,
        capability=(10, 0),
        peak_tflops=_B200, achievable=measured_efficiency(_B200, bf16=1745, fp8=3432.5),
        achievable_source=MEASURED,
        measured=HALVES_AND_FP8, link=NVLINK_5, host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        network=_DGX_B200, driver_names=(r"NVIDIA B200",),
        source=f"{PEAKS}; bandwidth: NVIDIA DGX B200 datasheet; {EC2_MEMORY}",
    ),
    Accelerator(
        name="B300", memory_bytes=275040 * MIB, bandwidth_bytes_per_s=8000e9,
        capability=(10, 3),
        peak_tflops=_B300, achievable=measured_efficiency(_B300, bf16=1769, fp8=3353.3),
        achievable_source=MEASURED,
        measured=HALVES_AND_FP8, link=NVLINK_5, host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        network=_DGX_B300, driver_names=(r"NVIDIA B300 SXM6 AC",),
        source=f"{PEAKS}; bandwidth: NVIDIA DGX B300 datasheet; {EC2_MEMORY}",
    ),
    Accelerator(
        name="GB200", memory_bytes=185 * GIB, bandwidth_bytes_per_s=8000e9, processors=152,
        capability=(10, 0),
        peak_tflops=_GB200, achievable=_GB200_REACHED, achievable_source=MEASURED,
        measured=HALVES_AND_FP8,
        link=NVLINK_5, host_link_bytes_per_s=C2C_BYTES_PER_S / 2, network=_NVL72,
        nvlink_domain=72, driver_names=(r"NVIDIA GB200",),
        source=f"{PEAKS}; memory (186 less what the driver keeps, as on B200), bandwidth: NVIDIA "
        "GB200 NVL72 datasheet; two devices share one Grace; processors: what its driver counts",
    ),
    Accelerator(
        name="GB300", memory_bytes=277 * GIB, bandwidth_bytes_per_s=8000e9,
        capability=(10, 3),
        peak_tflops=_GB300, achievable=sibling_efficiency(_GB200_REACHED, _GB300),
        achievable_source="not measured; as GB200, the generation before in the same rack",
        link=NVLINK_5, host_link_bytes_per_s=C2C_BYTES_PER_S / 2, network=_GB300_NVL72,
        nvlink_domain=72, driver_names=(r"NVIDIA GB300",),
        source=f"{PEAKS}; memory (20 TB of 72, less what the driver keeps), bandwidth: NVIDIA "
        "GB300 NVL72 datasheet",
    ),
    Accelerator(
        name="L4", memory_bytes=22888 * MIB, bandwidth_bytes_per_s=300e9, processors=58,
        capability=(8, 9),
        peak_tflops=_L4, achievable=sibling_efficiency(_A100_PCIE_REACHED, _L4),
        achievable_source=_AS_A100_PCIE, link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        driver_names=(r"NVIDIA L4",),
        source=f"NVIDIA L4 datasheet (half of its sparse figures); {EC2_MEMORY}",
    ),
    Accelerator(
        name="L40S", memory_bytes=45776 * MIB, bandwidth_bytes_per_s=864e9, processors=142,
        capability=(8, 9),
        peak_tflops=_L40S, achievable=sibling_efficiency(_A100_PCIE_REACHED, _L40S),
        achievable_source=_AS_A100_PCIE, link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        driver_names=(r"NVIDIA L40S",), source=f"{PEAKS}; NVIDIA L40S datasheet; {EC2_MEMORY}",
    ),
    Accelerator(
        name="A10G", memory_bytes=22888 * MIB, bandwidth_bytes_per_s=600e9, processors=80,
        capability=(8, 6),
        link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4], driver_names=(r"NVIDIA A10G",),
        source=f"{EC2_MEMORY}; its sources disagree on the peak (62.5 to 140 TFLOP/s): left out",
    ),
    Accelerator(
        name="T4", memory_bytes=16 * GIB, bandwidth_bytes_per_s=320e9, processors=40,
        capability=(7, 5),
        peak_tflops=_T4, achievable=sibling_efficiency(_A100_PCIE_REACHED, _T4),
        achievable_source=_AS_A100_PCIE, link=pcie(3), host_link_bytes_per_s=PCIE_BYTES_PER_S[3],
        driver_names=(r"Tesla T4",), source="NVIDIA T4 datasheet",
    ),
    Accelerator(
        name="RTX 4090", memory_bytes=24 * GIB, bandwidth_bytes_per_s=1008e9, processors=128,
        capability=(8, 9),
        peak_tflops=_4090, achievable=sibling_efficiency(_A100_PCIE_REACHED, _4090),
        achievable_source=_AS_A100_PCIE, link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        driver_names=(r"NVIDIA GeForce RTX 4090",),
        source="NVIDIA Ada GPU architecture white paper, appendix A: dense, fp32 accumulation",
    ),
    Accelerator(
        name="RTX A6000", memory_bytes=48 * GIB, bandwidth_bytes_per_s=768e9, processors=84,
        capability=(8, 6),
        peak_tflops=_A6000, achievable=sibling_efficiency(_A100_PCIE_REACHED, _A6000),
        achievable_source=_AS_A100_PCIE, link=pcie(4), host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        driver_names=(r"NVIDIA RTX A6000",),
        source="NVIDIA RTX A6000 datasheet (half of its sparse figures)",
    ),
    Accelerator(
        name="RTX PRO 6000", memory_bytes=96 * GIB, bandwidth_bytes_per_s=1597e9, processors=188,
        capability=(12, 0),
        peak_tflops=_PRO_6000, achievable=sibling_efficiency(_A100_PCIE_REACHED, _PRO_6000),
        achievable_source=_AS_A100_PCIE, link=pcie(5), host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        driver_names=(r"NVIDIA RTX PRO 6000 Blackwell Server Edition",),
        source="NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet, half of its figures with "
        "sparsity",
    ),
)  # fmt: skip
