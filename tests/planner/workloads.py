"""Workloads and clusters for the tests of the planner: what is not said is ordinary."""

from dataclasses import replace
from typing import Any

from benchmarks.planner_frameworks import BUFFERED
from shardyard.config.layout import Layout
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.catalogue import accelerator_by_name, instance
from shardyard.hardware.cluster import ClusterHardware, cluster_of, default_cluster
from shardyard.planner.workload import Formats, Techniques, Workload

OURS = Formats(compute="bf16", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, reduce_bytes=4)
"""As ``fully_shard`` with mixed precision keeps them."""

ZERO_PAPER = Formats(
    compute="fp16", weight_bytes=2, gradient_bytes=2, optimizer_bytes=12, reduce_bytes=2,
    keeping=BUFFERED,
)  # fmt: skip
"""Mixed-precision Adam of Rajbhandari et al. 2020, arXiv:1910.02054, and of Megatron-LM in fp16."""

EAGER = Techniques(kernels="eager", loss="in place")
"""As the training half computes without a compiler."""

MEGATRON_2022 = Techniques(
    attention="unfused", dropout=True, sequence_parallel=False, overlap_data=False,
    balanced_stages=False,
)  # fmt: skip
"""Megatron-LM before FlashAttention; sequence parallelism was new."""


def layout(**degrees: int) -> Layout:
    """One rank and zero 3 unless said otherwise."""
    return Layout(**{"dp_replicate": 1, "dp_shard": 1, "zero": 3, **degrees})


def workload(preset: str | ModelShape = "llama2-7b", **given: Any) -> Workload:
    """A step as the training half takes it: 4,096 tokens, two micro-batches of one sample a rank.

    Args:
        given: Fields of ``Workload``; of ``layout`` also degrees alone (``dp_shard=8``).
    """
    degrees = {axis: given.pop(axis) for axis in Layout.__dataclass_fields__ if axis in given}
    settings: dict[str, Any] = {
        "shape": PRESETS[preset].shape if isinstance(preset, str) else preset,
        "layout": layout(**degrees),
        "seq_len": 4096,
        "micro_batch": 1,
        "formats": OURS,
        "techniques": EAGER,
        **given,
    }
    passes = settings.pop("passes", 2)
    whole = passes * settings["micro_batch"] * settings["layout"].data_ranks
    return Workload(**{"global_batch": whole, **settings})


def p5(nodes: int = 2) -> ClusterHardware:
    """H100 nodes of EC2."""
    return cluster_of(instance("p5.48xlarge"), nodes)


def dgx(accelerator: str, *, devices: int) -> ClusterHardware:
    """Nodes of eight, or one of fewer, as the vendor builds them."""
    per_node = min(8, devices)
    return default_cluster(
        accelerator_by_name(accelerator), devices_per_node=per_node, nodes=devices // per_node
    )


def with_rates(cluster: ClusterHardware, **rates: Any) -> ClusterHardware:
    """The cluster with other rates of its device (fields of ``Accelerator``)."""
    return replace(cluster, accelerator=replace(cluster.accelerator, **rates))
