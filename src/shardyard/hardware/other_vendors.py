"""Accelerators of AMD, Intel, AWS and Google: one row each, with its sources next to it.

AMD devices print their name through ROCm; Gaudi through habana_frameworks.
"""

from shardyard.hardware.accelerator import (
    GIB,
    HALVES,
    HALVES_AND_FP8,
    Accelerator,
    measured_efficiency,
    sibling_efficiency,
)
from shardyard.hardware.links import PCIE_BYTES_PER_S, direct, network
from shardyard.hardware.nvidia import MEASURED, PEAKS

_GAUDI_SOURCE = (
    "Intel publishes no peak: HabanaAI's graph compiler (hal_reader/gaudi1) counts 4 x 64 x 64 "
    "multiply-adds a clock in bf16 at 1.9 GHz, a quarter in fp32. The same count gives Gaudi 2's "
    "datasheet peak. Memory, 1 TB/s: Habana Gaudi white paper"
)
_NEURON = "AWS Neuron documentation"
_TPU = "Google Cloud documentation, jax-ml/scaling-book"
_ROCE_3_OF_10 = "Habana Gaudi white paper: 3 of 10 x 100 Gb/s leave an HLS-1"

_CDNA3 = {"fp32": 163.4, "fp16": 1300.0, "bf16": 1300.0, "fp8": 2610.0}
_MI355X = {"fp32": 157.3, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0}
_MI250X_GCD = {"fp32": 23.95, "fp16": 191.5, "bf16": 191.5}
_GAUDI = {"fp32": 15.6, "bf16": 62.3}
_GAUDI2 = {"bf16": 432.0, "fp8": 865.0}
_GAUDI3 = {"fp32": 229.0, "fp16": 459.0, "bf16": 1677.0, "fp8": 1677.0}
_GAUDI2_REACHED = measured_efficiency(_GAUDI2, bf16=418.7, fp8=826.5)

_MI300X_REACHED = measured_efficiency(_CDNA3, bf16=668.4, fp8=990)
_MI300X_FP8 = "fp8: about 990 TFLOP/s, SemiAnalysis, MI300X vs H100 vs H200, December 2024"
_AMD_PLATFORM = network(
    "RoCE", gbps=400, source="AMD Instinct MI300X platform reference: 8 x 400 Gb/s"
)

ROWS: tuple[Accelerator, ...] = (
    Accelerator(
        name="MI250X", memory_bytes=64 * GIB, bandwidth_bytes_per_s=1638e9, processors=110,
        peak_tflops=_MI250X_GCD, achievable=sibling_efficiency(_MI300X_REACHED, _MI250X_GCD),
        achievable_source="not measured; as MI300X, the generation after it",
        network=network("Slingshot 11", gbps=100, source="OLCF Frontier user guide: 4 x 200 Gb/s "
                        "for 8 devices"),
        driver_names=(r"AMD Instinct MI250X",),
        source=f"{PEAKS}; AMD MI250X datasheet. One device is half a card (a GCD), as ROCm shows "
        "it; its peers are 50 to 200 GB/s away, so no one link is given",
    ),
    Accelerator(
        name="MI300X", memory_bytes=192 * GIB, bandwidth_bytes_per_s=5300e9, processors=304,
        peak_tflops=_CDNA3, achievable=_MI300X_REACHED,
        achievable_source=f"{MEASURED}; {_MI300X_FP8}",
        measured=HALVES_AND_FP8,
        link=direct("Infinity Fabric", gb_per_s=448, source="AMD MI300X platform datasheet: 7 x "
                    "128 GB/s both ways"),
        host_link_bytes_per_s=PCIE_BYTES_PER_S[5], network=_AMD_PLATFORM,
        driver_names=(r"AMD Instinct MI300X",),
        source=f"{PEAKS}; bandwidth: AMD MI300X datasheet",
    ),
    Accelerator(
        name="MI325X", memory_bytes=256 * GIB, bandwidth_bytes_per_s=6000e9, processors=304,
        peak_tflops=_CDNA3, achievable=measured_efficiency(_CDNA3, bf16=784.9),
        achievable_source=MEASURED,
        measured=HALVES,
        link=direct("Infinity Fabric", gb_per_s=448, source="AMD MI325X platform datasheet: 7 x "
                    "128 GB/s both ways"),
        host_link_bytes_per_s=PCIE_BYTES_PER_S[5], network=_AMD_PLATFORM,
        driver_names=(r"AMD Instinct MI325X",),
        source=f"{PEAKS}; memory, bandwidth: AMD MI325X datasheet",
    ),
    Accelerator(
        name="MI355X", memory_bytes=288 * GIB, bandwidth_bytes_per_s=8000e9, processors=256,
        peak_tflops=_MI355X, achievable=measured_efficiency(_MI355X, bf16=1565),
        achievable_source=MEASURED,
        measured=HALVES,
        link=direct("Infinity Fabric", gb_per_s=537.6, source="AMD MI355X platform datasheet: 7 x "
                    "153.6 GB/s both ways"),
        host_link_bytes_per_s=PCIE_BYTES_PER_S[5], network=_AMD_PLATFORM,
        driver_names=(r"AMD Instinct MI355X",),
        source=f"{PEAKS}; memory, bandwidth: AMD MI355X datasheet",
    ),
    Accelerator(
        name="Gaudi", device="hpu", memory_bytes=32 * GIB, bandwidth_bytes_per_s=1000e9,
        processors=4, peak_tflops=_GAUDI, achievable=sibling_efficiency(_GAUDI2_REACHED, _GAUDI),
        achievable_source="not measured; as Gaudi2, the same kind of matrix engine",
        link=direct("7 x 100 Gb/s RoCE", gb_per_s=87.5, source="Habana Gaudi white paper: HLS-1, "
                    "one port to each of 7 peers"),
        host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        network=network("3 x 100 Gb/s RoCE", gbps=300, source=_ROCE_3_OF_10),
        driver_names=(r"GAUDI",), source=_GAUDI_SOURCE,
    ),
    Accelerator(
        name="Gaudi2", device="hpu", memory_bytes=96 * GIB, bandwidth_bytes_per_s=2450e9,
        processors=2, peak_tflops=_GAUDI2, achievable=_GAUDI2_REACHED, achievable_source=MEASURED,
        measured=HALVES_AND_FP8,
        link=direct("21 x 100 Gb/s RoCE", gb_per_s=262.5, source="Intel Gaudi 2 white paper: 3 of "
                    "24 ports to each of 7 peers"),
        host_link_bytes_per_s=PCIE_BYTES_PER_S[4],
        network=network("3 x 100 Gb/s RoCE", gbps=300, source="Intel Gaudi 2 white paper: 3 of 24 "
                        "ports leave the node"),
        driver_names=(r"GAUDI2",),
        source=f"{PEAKS}; memory, bandwidth: Intel Gaudi 2 white paper",
    ),
    Accelerator(
        name="Gaudi3", device="hpu", memory_bytes=128 * GIB, bandwidth_bytes_per_s=3700e9,
        processors=8, peak_tflops=_GAUDI3,
        achievable=measured_efficiency(_GAUDI3, bf16=1243, fp8=1289.5),
        achievable_source=MEASURED,
        measured=HALVES_AND_FP8,
        link=direct("21 x 200 Gb/s RoCE", gb_per_s=525, source="Intel Gaudi documentation, network "
                    "configuration: 525 GB/s one way"),
        host_link_bytes_per_s=PCIE_BYTES_PER_S[5],
        network=network("3 x 200 Gb/s RoCE", gbps=600, source="Intel Gaudi documentation, network "
                        "configuration: 75 GB/s one way"),
        driver_names=(r"GAUDI3",),
        source=f"{PEAKS}; memory and bandwidth: Intel Gaudi 3 white paper",
    ),
    Accelerator(
        name="Trainium1", device="xla", memory_bytes=32 * GIB, bandwidth_bytes_per_s=820e9,
        processors=2, peak_tflops={"fp32": 47.5, "fp16": 190.0, "bf16": 190.0},
        link=direct("NeuronLink 2", gb_per_s=192, source=f"{_NEURON}: 384 GB/s both ways"),
        network=network("EFA", gbps=50, source="trn1.32xlarge: 800 Gb/s for 16"),
        source=f"{_NEURON}; no best matrix product is published",
    ),
    Accelerator(
        name="Trainium2", device="xla", memory_bytes=96 * GIB, bandwidth_bytes_per_s=2900e9,
        processors=8, peak_tflops={"fp32": 181.0, "fp16": 667.0, "bf16": 667.0, "fp8": 1299.0},
        link=direct("NeuronLink 3", gb_per_s=640, source=f"{_NEURON}: 1280 GB/s both ways"),
        network=network("EFA", gbps=200, source="trn2.48xlarge: 3200 Gb/s for 16"),
        source=f"{_NEURON}; no best matrix product is published",
    ),
    Accelerator(
        name="TPU v4", device="xla", memory_bytes=32 * GIB, bandwidth_bytes_per_s=1228e9,
        processors=8, peak_tflops={"bf16": 275.0}, nvlink_domain=4096,
        link=direct("ICI", gb_per_s=270, source=f"{_TPU}: 6 x 45 GB/s"), source=_TPU,
    ),
    Accelerator(
        name="TPU v5e", device="xla", memory_bytes=16 * GIB, bandwidth_bytes_per_s=819e9,
        processors=4, peak_tflops={"bf16": 197.0}, nvlink_domain=256,
        link=direct("ICI", gb_per_s=180, source=f"{_TPU}: 4 x 45 GB/s"), source=_TPU,
    ),
    Accelerator(
        name="TPU v5p", device="xla", memory_bytes=95 * GIB, bandwidth_bytes_per_s=2765e9,
        processors=8, peak_tflops={"bf16": 459.0}, nvlink_domain=8960,
        link=direct("ICI", gb_per_s=540, source=f"{_TPU}: 6 x 90 GB/s"), source=_TPU,
    ),
    Accelerator(
        name="TPU v6e", device="xla", memory_bytes=32 * GIB, bandwidth_bytes_per_s=1640e9,
        peak_tflops={"bf16": 918.0, "fp8": 918.0}, nvlink_domain=256,
        link=direct("ICI", gb_per_s=360, source=f"{_TPU}: 4 x 90 GB/s"), source=_TPU,
    ),
)  # fmt: skip
