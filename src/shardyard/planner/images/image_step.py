"""What is predicted of a run on images: one training step, said without the words of any framework.

Beside ``planner/workload.py``, for networks whose operators are known one by one
(``families/images``). An image takes the place of a token: a sample is one image.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from shardyard.config.layout import Layout
from shardyard.families.images.operators import Operator
from shardyard.hardware.cluster import Cluster
from shardyard.planner.images.decoding import decoded_per_s
from shardyard.planner.workload import Formats, Recompute, Techniques


@dataclass(frozen=True, kw_only=True)
class Part:
    """Operators that follow each other: a block, or what stands before or after the blocks."""

    name: str
    """Of the block; empty: it is none."""
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
    counted_as_kept: str = ""
    """Recompute mode that is not counted, so that all is taken to be kept."""
    threads: int | None = None
    """That decode for each device, as the recipe asks; None: as many as there is room for."""
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
    def parts(self) -> tuple[Part, ...]:
        """In the order of the forward pass."""
        return tuple(
            Part(name=name, operators=tuple(rows))
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


def image_step_on(step: ImageStep, cluster: Cluster) -> ImageStep:
    """The same work with the batch that it has on a cluster, decoded by the cores there."""
    batch = step.global_batch
    if step.batch_per_device is not None:
        batch = step.batch_per_device * cluster.devices
    return replace(step, global_batch=batch, decoded_per_s=decoded_per_s(cluster, step.threads))
