"""Workload of a run on images: one training step, independent of any framework.

Counterpart of ``planner/workload.py``, for networks whose operators are known one by one
(``families/images``). An image takes the place of a token: a sample is one image. The
module also estimates the decoding by a node's cores.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from shardyard.config.formulas import copies, step_samples
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.operators import Operator
from shardyard.families.images.registry import operators_of
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.workload import Formats, Recompute, Techniques, formats_of

# The cores of a node decode images. Devices that train faster than that wait for them.

DECODED_PER_WORKER_S = 130.0
"""Images that one worker process decodes, crops and flips in a second with busy neighbours.

The images have ImageNet's sizes. Decoding is the limit in this source: EfficientNet-B0
reaches 16,652 images/s on 8 A100 with 16 workers each, 130 a worker, and ResNet-50, with
ten times its work, 16,621 (NVIDIA/DeepLearningExamples @0107cf27,
PyTorch/Classification/ConvNets: efficientnet/README.md, resnet50v1.5/README.md; workers and
the PyTorch loader: configs.yml). Pillow-SIMD decoded there. The rate of smaller or larger
images depends on their pixels, which this number ignores.
"""

THREADS_SHARE = 0.8
"""Share of a node's hardware threads that decode.

The rest belongs to the processes that train and to the host. 64 workers kept that rate on
the 80 threads of a DGX-1: 8,322 images/s of ResNet-50 (the same source).
"""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoding rate of cores compared with the training rate of devices."""

    trained_per_s: float
    """Images that the devices take, if they are never made to wait."""
    decoded_per_s: float
    """Images that the cores of all nodes decode."""
    workers: int
    """Decoding workers of one node."""
    needed: int
    """Workers of one node that would keep its devices busy."""
    reason: str

    @property
    def is_bound(self) -> bool:
        """Whether the devices wait."""
        return self.decoded_per_s < self.trained_per_s


def workers_of(cluster: ClusterHardware, threads: int | None) -> int | None:
    """Count the decoding workers of one node. None if its number of hardware threads is not known.

    Args:
        threads: Threads of each device's process, as the recipe asks; None: as many as fit.
    """
    if cluster.threads is None:
        return None
    # A recipe may ask for more threads than the node has.
    if threads is not None:
        return min(threads * cluster.devices_per_node, cluster.threads)
    return max(1, int(THREADS_SHARE * cluster.threads))


def decoded_per_s(cluster: ClusterHardware, threads: int | None) -> float | None:
    """Images that all nodes decode in a second; as ``workers_of``."""
    workers = workers_of(cluster, threads)
    return None if workers is None else cluster.nodes * workers * DECODED_PER_WORKER_S


def decoding_of(
    trained_per_s: float, cluster: ClusterHardware, threads: int | None
) -> Decoding | None:
    """Set one against the other; as ``workers_of``."""
    used = workers_of(cluster, threads)
    if used is None:
        return None
    return Decoding(
        trained_per_s=trained_per_s,
        decoded_per_s=cluster.nodes * used * DECODED_PER_WORKER_S,
        workers=used,
        needed=math.ceil(trained_per_s / cluster.nodes / DECODED_PER_WORKER_S),
        reason=f"{used} of {cluster.threads} hardware threads decode, "
        f"{DECODED_PER_WORKER_S:.0f} images/s each (NVIDIA/DeepLearningExamples, 128 workers)",
    )


@dataclass(frozen=True, kw_only=True)
class OperatorGroup:
    """Operators that follow each other: a block, or a part before or after the blocks."""

    name: str
    """Name of the block; empty if it is none."""
    operators: tuple[Operator, ...]

    @cached_property
    def parameters(self) -> int:
        """All of them are trained."""
        return sum(row.parameters for row in self.operators)


@dataclass(frozen=True, kw_only=True)
class ImageStep:
    """One training step of one network under one layout."""

    operators: tuple[Operator, ...]
    size: int
    """Pixels on a side."""
    layout: Layout
    micro_batch: int
    """Images in one pass of one data rank."""
    global_batch: int
    formats: Formats
    recompute: Recompute = "none"
    """``none`` or ``full``: blocks are made again from their input."""
    techniques: Techniques
    batch_per_device: int | None = None
    """Samples of a device in a step, where ``global_batch`` follows the devices."""
    products: str = ""
    """Format of matrix products where it is not the computing format: tf32."""
    channels_last: bool = True
    """Whether tensors lie as the tensor cores read them (NHWC); else they are turned for them."""
    sums_norms: bool = False
    """Whether batch norms are over all samples of a step: each asks all ranks, in both passes."""
    ignored_recompute: str = ""
    """Recompute mode that is not counted, so that all is taken to be kept."""
    threads: int | None = None
    """Decoding threads for each device, as the recipe asks. None: as many as there is room for."""
    decoded_per_s: float | None = None
    """Images that the cores of all nodes decode in a second; None: never waited for."""

    @property
    def seq_len(self) -> int:
        """A sample is one image."""
        return 1

    @property
    def micro_batches(self) -> int:
        """Passes of one data rank in one step."""
        per_rank = -(-self.global_batch // self.layout.data_ranks)
        return -(-per_rank // self.micro_batch)

    @property
    def product_format(self) -> str:
        """In which the matrix products are computed."""
        return self.products or self.formats.compute

    @property
    def has_batch_norm(self) -> bool:
        """Whether the micro-batch is a part of what is learnt."""
        return any(row.buffers for row in self.operators)

    @cached_property
    def parts(self) -> tuple[OperatorGroup, ...]:
        """In the order of the forward pass."""
        return tuple(
            OperatorGroup(name=name, operators=tuple(rows))
            for name, rows in groupby(self.operators, key=lambda row: row.block)
        )

    @cached_property
    def parameters(self) -> int:
        """Weights, biases, scale and shift of norms."""
        return sum(row.parameters for row in self.operators)

    @cached_property
    def buffers(self) -> int:
        """Running means and variances."""
        return sum(row.buffers for row in self.operators)

    @property
    def flops_per_image(self) -> float:
        """Model FLOP of one image, forward and backward: the backward pass is two forward ones."""
        return 3.0 * sum(row.flops for row in self.operators)


def with_image_layout(
    step: ImageStep, layout: Layout, *, micro_batch: int, recompute: Recompute
) -> ImageStep:
    """The same network and batch under another layout of as many devices."""
    return replace(step, layout=layout, micro_batch=micro_batch, recompute=recompute)


def image_step_on(step: ImageStep, cluster: ClusterHardware) -> ImageStep:
    """The same work with the batch that it has on a cluster, decoded by the cores there."""
    batch = step.global_batch
    if step.batch_per_device is not None:
        batch = step.batch_per_device * cluster.devices
    return replace(step, global_batch=batch, decoded_per_s=decoded_per_s(cluster, step.threads))


# A recipe for images becomes a step here, and settings that no plan counts are listed.


def image_step_of(
    recipe: Recipe, network: ImageNetwork, layout: Layout, cluster: ClusterHardware | None
) -> ImageStep:
    """The step of a recipe without any ``auto``, as the training half carries it out.

    Args:
        cluster: Its cores decode; None: not known, so that decoding is never waited for.
    """
    micro_batch, size = recipe.optim.micro_batch, recipe.data.images.size
    asked = recipe.data.images.threads
    threads = None if asked == "auto" else asked
    offload, recompute = recipe.memory.offload, recipe.memory.recompute
    assert isinstance(micro_batch, int) and isinstance(size, int)
    assert offload in ("none", "optimizer"), "the recipe's check refuses the others"
    return ImageStep(
        operators=operators_of(replace(network, size=size)),
        size=size,
        layout=layout,
        micro_batch=micro_batch,
        global_batch=step_samples(recipe.optim, devices=layout.world_size),
        batch_per_device=recipe.optim.batch_per_device,
        formats=formats_of(recipe),
        recompute="full" if recompute == "full" else "none",
        ignored_recompute="" if recompute in ("none", "full") else f"{recompute}",
        sums_norms=recipe.model.batch_norm == "step",
        techniques=Techniques(
            kernels="eager",
            prefetch=recipe.parallel.prefetch,
            offload=offload,
            updates_on_host=False,
            snapshots=copies(recipe),
            has_standby=recipe.elastic.parked is True,
        ),
        threads=threads,
        decoded_per_s=None if cluster is None else decoded_per_s(cluster, threads),
    )


def check_unplanned_settings(recipe: Recipe) -> Iterable[Problem]:
    """Yield settings of a recipe for images that no plan counts; such a run starts anyway."""
    recompute = recipe.memory.recompute
    if recompute not in ("none", "full"):
        text = f"={recompute!r} of a network for images is in no plan yet. Use none or full."
        yield Problem("memory.recompute", text)
    if recipe.model.compile is True:
        text = "=true: what a compiler makes of convolutions is in no plan yet. Use false."
        yield Problem("model.compile", text)
