"""One optimizer step, from micro-batches to new weights, without waiting for the device.

The loss is the sum of all token losses of the step, divided once by the number of its targets (the
tokens predicted in it), over all ranks. Gradients are therefore summed undivided; the division, the
clipping and the skip of a step that is not finite all happen inside the fused optimizer. One small
all-reduce a step carries everything that ranks must agree on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.data.loader import MicroBatch
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.accumulate import Accumulator
from shardyard.tasks.causal_lm import CausalLM
from shardyard.train.optim import ShardOptimizer, put_nan


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to, the same on every rank."""

    loss: float
    """Mean over targets, nats."""
    grad_norm: float
    """Global norm before clipping."""
    targets: int
    """Tokens predicted: what divided the loss."""
    tokens: int
    """Tokens that went through the model, padding left out."""
    skipped_in_row: int
    """Steps in a row, this one included, that were not applied because they were not finite."""
    drain_requested: bool
    """Whether any rank was asked to drain before this step."""
    router: tuple[float, float, float] | None = None
    """Of a mixture of experts: largest load, load-balance loss, z-loss (``RouterStatistics``)."""


class PendingResult:
    """A step's result on its way from the device; reading it waits for that step, not a later."""

    def __init__(self, on_device: Tensor) -> None:
        self._event: torch.Event | None = None
        if on_device.device.type == "cpu":
            self._values = on_device
            return
        self._values = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
        self._values.copy_(on_device, non_blocking=True)
        self._event = torch.Event(device=on_device.device)
        self._event.record()

    @property
    def is_ready(self) -> bool:
        """True on a CPU, where a step is over when its last call returns."""
        return self._event is None

    def read(self) -> StepResult:
        """Wait for the step and return its result."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm, targets, tokens, skipped, drain, *router = self._values.tolist()
        return StepResult(
            loss=loss,
            grad_norm=norm,
            targets=round(targets),
            tokens=round(tokens),
            skipped_in_row=round(skipped),
            drain_requested=drain > 0,
            router=(router[0], router[1], router[2]) if router else None,
        )


class Stepper:
    """Runs optimizer steps of one model on this rank."""

    def __init__(
        self,
        task: CausalLM,
        optimizer: ShardOptimizer,
        mesh: Mesh,
        *,
        device: torch.device,
        grad_clip: float | None,
    ) -> None:
        self._task = task
        self._optimizer = optimizer
        self._mesh = mesh
        self._device = device
        self._grad_clip = grad_clip
        self._accumulate = Accumulator(task, mesh.layout, device=device)
        self.skipped_in_row = torch.zeros((), dtype=torch.float64, device=device)

    def run(
        self, batches: Sequence[MicroBatch], *, lr: float, drain: bool, poisoned: bool = False
    ) -> PendingResult:
        """Take one step.

        Args:
            drain: This rank's wish; the result holds that of all ranks.
            poisoned: Put NaN into a gradient first, for a drill.
        """
        loss_sum, targets = self.accumulate(batches)
        if poisoned:
            put_nan(self._optimizer.gradients())
        # fp64: a sum of squares over many ranks, and counts that fp32 would round
        stats = torch.zeros(5, dtype=torch.float64, device=self._device)
        if self._mesh.tensor_rank == 0:  # the others have computed the same loss
            stats[0] = loss_sum
        stats[1] = self._optimizer.square_sum()
        if self._mesh.speaks_for_samples:
            stats[2] = targets
            stats[3] = sum(batch.num_tokens for batch in batches)
        stats[4] = float(drain)
        router = self._task.router
        if router is not None:
            stats = torch.cat([stats, router.take(self._device)])
        dist.all_reduce(stats)
        loss, norm = stats[0] / stats[2], stats[1].sqrt() / stats[2]
        self._apply(loss, norm, targets=stats[2], lr=lr)
        values = [loss, norm, stats[2], stats[3], self.skipped_in_row, stats[4]]
        if router is not None:
            values += router.statistics(stats[5:])
        return PendingResult(torch.stack(values))

    def accumulate(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, int]:
        """Add up undivided gradients.

        Returns:
            This rank's loss sum (fp64), and the targets of its samples.
        """
        targets = sum(batch.num_targets for batch in batches)  # still in host memory
        return self._accumulate(batches), targets

    def _apply(self, loss: Tensor, norm: Tensor, *, targets: Tensor, lr: float) -> None:
        """Divide, clip and apply the gradients, or skip the step if it is not finite."""
        not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self.skipped_in_row = (self.skipped_in_row + 1.0) * not_finite
        divisor = targets
        if self._grad_clip is not None:
            divisor = targets * (norm / self._grad_clip).clamp(min=1.0)
        self._optimizer.step(lr=lr, divisor=divisor, skip=not_finite)
