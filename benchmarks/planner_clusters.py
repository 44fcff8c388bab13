"""The machines of a table row: its accelerator from the catalogue, and what joins the devices.

A row names a device and rarely a network. Then the vendor's reference system stands in: NVLink
inside, the network of a DGX between nodes. Where the row or a publication about the cluster says
otherwise, that counts (``_NETWORKS``).
"""

import re
from dataclasses import dataclass, replace

from benchmarks.planner_frameworks import has
from benchmarks.planner_shapes import Unknown
from benchmarks.planner_table import Row
from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import ACCELERATORS
from shardyard.hardware.cluster import ClusterHardware, default_cluster
from shardyard.hardware.links import Link, network
from shardyard.planner.collectives import BETWEEN_SHARE

_BY_NAME = {row.name: row for row in ACCELERATORS}

_PER_NODE = 8
"""Devices of a node where the row names no number: that of DGX and HGX systems."""


@dataclass(frozen=True, kw_only=True)
class _Network:
    """A published fact about the network of a cluster."""

    gpu: str
    words: str
    """Pattern in framework, model, notes and flags."""
    bus_gbps_per_node: float
    """Bus bandwidth of an all-reduce over all devices of several nodes, as measured there."""
    source: str


# Four Omni-Path adapters of 100 Gb/s a node, of which NCCL did not make use: its users measured a
# tenth of the 400 Gb/s and say so.
_NETWORKS = (
    _Network(
        gpu="a100", words=r"megatron-deepspeed.*bloom", bus_gbps_per_node=40.5,
        source="bigscience-workshop/bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt",
    ),
    _Network(
        gpu="v100", words=r"\bjz\b|jean.?zay", bus_gbps_per_node=54.2,
        source="bigscience-workshop/bigscience, experiments/bandwidth/README.md, 16 nodes",
    ),
)  # fmt: skip


def accelerator_of(row: Row) -> Accelerator | Unknown:
    """The catalogue's accelerator of a row; a maker's form that the row leaves open is SXM."""
    gpu, memory = row.text("gpu"), row.quantity("gpu_mem_gb")
    printed = re.search(r"(\d+) ?gi?b", gpu)
    memory = float(printed[1]) if printed else memory
    if has(gpu, "h100") and has(row.text("flags", "notes"), "hbm2e"):
        return _BY_NAME["H100 96GB HBM2e"]
    for pattern, sizes in _NAMES:
        if not has(gpu, pattern):
            continue
        # the row of the printed memory, or else the first, the most common
        name = sizes.get(memory or 0) or next(iter(sizes.values()))
        if name in _BY_NAME:
            return _BY_NAME[name]
    plain = re.sub(r"[^a-z0-9]", "", gpu)
    for name, accelerator in _BY_NAME.items():
        if plain == re.sub(r"[^a-z0-9]", "", name.lower()):
            return accelerator
    return Unknown(f"accelerator not in the catalogue: {row.raw('gpu') or 'none given'}")


# Pattern in the row's device -> memory in GB -> the catalogue's name; special forms first.
_NAMES: tuple[tuple[str, dict[float, str]], ...] = (
    (r"v100.*pcie", {16: "V100 PCIe 16GB", 32: "V100 PCIe 32GB"}),
    (r"v100", {32: "V100 32GB", 16: "V100 16GB"}),
    (r"a100.*pcie", {80: "A100 PCIe 80GB", 40: "A100 PCIe 40GB"}),
    (r"a100", {80: "A100 80GB", 40: "A100 40GB"}),
    (r"gh200", {96: "GH200"}),
    (r"h100.*pcie", {80: "H100 PCIe"}),
    (r"h100.*nvl\b", {94: "H100 NVL"}),
    (r"h100", {80: "H100 SXM", 94: "H100 NVL", 96: "H100 96GB HBM2e"}),
    (r"h200", {141: "H200"}),
    (r"gb300", {288: "GB300"}),
    (r"gb200", {192: "GB200"}),
    (r"b300", {288: "B300"}),
    (r"b200", {192: "B200"}),
    (r"l40s", {48: "L40S"}),
    (r"\bl4\b", {24: "L4"}),
    (r"a10g", {24: "A10G"}),
    (r"\bt4\b", {16: "T4"}),
    (r"4090", {24: "RTX 4090"}),
    (r"a6000", {48: "RTX A6000"}),
    (r"rtx pro 6000", {96: "RTX PRO 6000"}),
    (r"mi250", {64: "MI250X"}),
    (r"mi300x", {192: "MI300X"}),
    (r"mi325x", {256: "MI325X"}),
    (r"mi355x", {288: "MI355X"}),
    (r"gaudi ?3", {128: "Gaudi3"}),
    (r"gaudi ?2", {96: "Gaudi2"}),
    (r"gaudi", {32: "Gaudi"}),
    (r"trn2|trainium ?2", {96: "Trainium2"}),
    (r"trn1|trainium", {32: "Trainium1"}),
    (r"v5p", {95: "TPU v5p"}),
    (r"v6e|trillium", {32: "TPU v6e"}),
    (r"v5e|v5 ?lite", {16: "TPU v5e"}),
    (r"v4\b", {32: "TPU v4"}),
)


def cluster_of(row: Row, accelerator: Accelerator, *, devices: int) -> ClusterHardware | Unknown:
    """Equal nodes that hold exactly these devices; a rack that NVLink joins counts as one node."""
    wanted = accelerator.nvlink_domain or row.count("gpus_per_node") or _PER_NODE
    per_node = min(wanted, devices)
    while devices % per_node:
        per_node -= 1
    between = _published_network(row, per_node) or accelerator.network
    if between is None and per_node < devices:
        return Unknown("network between nodes not known")
    try:
        one = default_cluster(accelerator, devices_per_node=per_node, nodes=1)
    except RequestError:
        return Unknown("link between devices not known")
    return replace(one, nodes=devices // per_node, between=between or one.between)


def _published_network(row: Row, per_node: int) -> Link | None:
    words = row.text("framework", "model", "notes", "flags")
    printed = re.search(r"interconnect (\d+) ?gbps", words)
    if printed:
        return _network(float(printed[1]), per_node, "the row's notes, read as per node")
    for fact in _NETWORKS:
        if has(row.text("gpu"), fact.gpu) and has(words, fact.words):
            return _network(fact.bus_gbps_per_node / BETWEEN_SHARE, per_node, fact.source)
    return None


def _network(gbps_per_node: float, per_node: int, source: str) -> Link:
    name = f"{gbps_per_node:g} Gb/s a node"
    return network(name, gbps=gbps_per_node / per_node, source=source)
