"""Search space of a network for images: data axes, zero levels, recompute.

With batch norms the micro-batch stays. They normalise over it, so that another one changes
the training result.
"""

from collections.abc import Iterator

from shardyard.config.layout import Layout
from shardyard.config.rules.layout import check_batch
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.images.memory import image_memory
from shardyard.planner.images.step import ImageStep, with_image_layout
from shardyard.planner.images.time import image_parts
from shardyard.planner.step_time import Parts
from shardyard.planner.workload import Recompute

_MODES: tuple[Recompute, ...] = ("none", "full")


class ImageSpace:
    """Every legal way to train a network for images on all devices of a cluster."""

    def __init__(
        self,
        step: ImageStep,
        cluster: ClusterHardware,
        calibration: Calibration | None,
        *,
        most: int,
    ) -> None:
        """Args:
        most: Largest micro-batch that is looked at where it is open.
        """
        self._step, self._cluster, self._calibration = step, cluster, calibration
        self._most = most

    def ways(self) -> Iterator[tuple[tuple[Layout, Recompute], list[int]]]:
        """Layouts and recompute modes, each with its micro-batches, smallest first."""
        ranks, batch = self._cluster.devices, self._step.global_batch
        # Only data axes split a network for images: every device reads samples of its own.
        sizes = self._sizes(-(-batch // ranks))
        if not sizes or check_batch(ranks, global_batch=batch, micro_batch=1):
            return
        for dp_shard in (n for n in range(1, ranks + 1) if ranks % n == 0):
            # One shard at zero 3 splits nothing, but it frees its copy in the computing format.
            for zero in (1, 2, 3) if dp_shard > 1 else (1, 3):
                layout = Layout(
                    dp_replicate=ranks // dp_shard, dp_shard=dp_shard, cp=1, tp=1, pp=1, ep=1,
                    zero=zero,
                )  # fmt: skip
                for recompute in _MODES:
                    yield (layout, recompute), sizes

    def work_for(self, way: tuple[Layout, Recompute], size: int) -> ImageStep:
        """The same network and batch in this way."""
        return with_image_layout(self._step, way[0], micro_batch=size, recompute=way[1])

    def device_bytes(self, work: ImageStep) -> float:
        """Return the memory at the peak, as the driver shows it."""
        return image_memory(work).device_bytes

    def parts(self, work: ImageStep) -> Parts:
        """Seconds of a step."""
        return image_parts(work, self._cluster, self._calibration)

    def _sizes(self, per_rank: int) -> list[int]:
        if self._step.has_batch_norm and self._step.sums_norms:
            return [per_rank]  # each rank computes its samples in one micro-batch
        if self._step.has_batch_norm:
            return [self._step.micro_batch] if self._step.micro_batch <= per_rank else []
        return [1 << bit for bit in range(min(per_rank, self._most).bit_length())]
