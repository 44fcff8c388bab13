"""The forward and backward passes of a step on this rank, whole model or pipeline."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardyard.config.legality import Layout
from shardyard.data.loader import MicroBatch
from shardyard.parallel.data import GradientSync, backward_all
from shardyard.tasks.causal_lm import CausalLM


class Accumulator:
    """Adds up the gradients of micro-batches, undivided."""

    def __init__(self, task: CausalLM, layout: Layout, *, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._sync = None if task.pipeline else GradientSync(task.model, layout)

    def __call__(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Take equally many micro-batches on every rank. Returns this rank's loss sum, fp64."""
        if self._sync is None:
            return self._through_pipeline(batches)
        losses = (self._task.loss_sum(batch.to(self._device)) for batch in batches)
        return backward_all(losses, self._sync, number=len(batches))

    def _through_pipeline(self, batches: Sequence[MicroBatch]) -> Tensor:
        task, on_device = self._task, [batch.to(self._device) for batch in batches]
        assert task.pipeline is not None
        return task.pipeline.accumulate(
            [task.inputs(batch) for batch in on_device],
            [task.targets(batch) for batch in on_device],
            task.token_losses,
        )
