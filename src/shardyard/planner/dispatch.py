"""Dispatch by kind of step, text or images: the one place where the two differ.

Code that plans, searches layouts or compares offers calls this module, and need not know
the kind.
"""

from dataclasses import replace
from typing import Literal, assert_never

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.families.images.network import ImageNetwork
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.estimate import Estimate, estimate
from shardyard.planner.images.memory import (
    image_memory,
    image_optimizer_bytes,
    image_savings,
    image_traffic,
)
from shardyard.planner.images.step import ImageStep, image_step_of, image_step_on, with_image_layout
from shardyard.planner.images.time import ImageEstimate, estimate_images
from shardyard.planner.kernels import flops_per_token
from shardyard.planner.memory import Fit, MemoryEstimate, Saving, Term, memory, savings
from shardyard.planner.offload import host_memory_shortage, host_shortage, snapshot_bytes
from shardyard.planner.traffic import traffic_terms
from shardyard.planner.workload import Recompute, Workload, on_devices, with_layout, workload_of

Model = ModelShape | ImageNetwork
Work = Workload | ImageStep
"""One training step of either."""
AnyEstimate = Estimate | ImageEstimate


def work_of(recipe: Recipe, model: Model, layout: Layout, cluster: ClusterHardware | None) -> Work:
    """The step of a recipe without any ``auto``.

    Args:
        cluster: None: not known.
    """
    match model:
        case ModelShape():
            return workload_of(recipe, model, layout)
        case ImageNetwork():
            return image_step_of(recipe, model, layout, cluster)
        case _:
            assert_never(model)


def unit_of(work: Work) -> Literal["token", "image"]:
    """Return the unit of rates, FLOP and prices."""
    return "token" if isinstance(work, Workload) else "image"


def memory_of(work: Work) -> MemoryEstimate:
    """All terms of the largest peak of a rank."""
    match work:
        case Workload():
            return memory(work)
        case ImageStep():
            return image_memory(work)
        case _:
            assert_never(work)


def estimate_of(
    work: Work, cluster: ClusterHardware, calibration: Calibration | None
) -> AnyEstimate:
    """Memory and time together.

    Raises:
        RequestError: The layout needs another number of devices, or a rate is not known.
    """
    match work:
        case Workload():
            return estimate(work, cluster, calibration)
        case ImageStep():
            found = estimate_images(work, cluster, calibration)
            return replace(found, fit=host_shortage_of(work, cluster) or found.fit)
        case _:
            assert_never(work)


def flops_of(work: Work) -> dict[str, float]:
    """FLOP of one token or one image, by convention; of images both are one."""
    match work:
        case Workload():
            return flops_per_token(work.shape, work.seq_len, work.trained)
        case ImageStep():
            return dict.fromkeys(("full", "causal"), work.flops_per_image)
        case _:
            assert_never(work)


def traffic_of(work: Work) -> tuple[Term, ...]:
    """Return what the busiest rank sends in a step."""
    match work:
        case Workload():
            return traffic_terms(work)
        case ImageStep():
            return image_traffic(work)
        case _:
            assert_never(work)


def savings_of(work: Work, *, on_cpu: bool) -> tuple[Saving, ...]:
    """Return the settings that save a rank most memory and do not change the training result."""
    match work:
        case Workload():
            return savings(work, on_cpu=on_cpu)
        case ImageStep():
            return image_savings(work)
        case _:
            assert_never(work)


def work_on_devices(work: Work, cluster: ClusterHardware) -> Work:
    """The same work on all devices of a cluster, with the batch that it has there."""
    match work:
        case Workload():
            return on_devices(work, cluster.devices)
        case ImageStep():
            return image_step_on(work, cluster)
        case _:
            assert_never(work)


def work_with(work: Work, layout: Layout, *, micro_batch: int, recompute: Recompute) -> Work:
    """The same model and batch under another layout."""
    match work:
        case Workload():
            return with_layout(work, layout, micro_batch=micro_batch, recompute=recompute)
        case ImageStep():
            return with_image_layout(work, layout, micro_batch=micro_batch, recompute=recompute)
        case _:
            assert_never(work)


def snapshot_bytes_of(work: Work) -> float:
    """Return the host memory of one rank's snapshots, with the replicas on its peer."""
    match work:
        case Workload():
            return snapshot_bytes(work)
        case ImageStep():
            if not work.techniques.snapshots:
                return 0.0
            # A snapshot holds what a checkpoint does: running statistics, but no gradients.
            kept = image_memory(work)
            state = sum(kept.term(name) for name in ("parameters", "running statistics"))
            return work.techniques.snapshots * (state + image_optimizer_bytes(work))
        case _:
            assert_never(work)


def host_shortage_of(work: Work, cluster: ClusterHardware) -> Fit | None:
    """Says so if the hosts have too little memory for what is moved or kept there."""
    if isinstance(work, Workload):
        return host_shortage(work, cluster)
    moved = image_optimizer_bytes(work) if work.techniques.offload == "optimizer" else 0.0
    return host_memory_shortage(cluster, moved, snapshot_bytes_of(work), techniques=work.techniques)


def parameters_of(work: Work) -> tuple[int, int]:
    """Trained and frozen."""
    match work:
        case ImageStep():
            return work.parameters, 0
        case Workload(trained=None):
            return work.shape.parameters, 0
        case Workload(trained=trained):
            assert trained is not None
            # Adapters add to the model's own parameters, all of which are frozen then.
            whole = work.shape.parameters + trained.added
            return trained.parameters, whole - trained.parameters
        case _:
            assert_never(work)
