"""One optimizer step, from micro-batches to new weights, without waiting for the device.

The loss is the sum of all losses of the step, divided once by how many there are, over all ranks.
Gradients are therefore summed undivided; the division, the clipping and the skip of a step that is
not finite all happen inside the fused optimizer. One small all-reduce a step carries everything
that ranks must agree on. A script of one's own takes the same step as far as its gradients
(``library/step.py``), adds up by the same sum (``train/loss_reduction.py``), and brings its own
optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from shardyard.data.loader import MicroBatch
from shardyard.observe.trace import OPTIMIZER
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.base import Task
from shardyard.tasks.loss_computation import Computation, LossSums
from shardyard.train.ema import WeightEma
from shardyard.train.loss_reduction import Totals, sum_over_ranks
from shardyard.train.loss_scaling import LossScaling
from shardyard.train.optim import ShardOptimizer, inject_nan


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, the same on every rank."""

    loss: float
    """Mean over all losses of the step; not a number where it had none."""
    grad_norm: float
    """Global norm before clipping."""
    targets: int
    """Divisor of the loss: for text, tokens predicted."""
    tokens: int
    """Tokens through the model, without padding."""
    skipped_in_row: int
    """Steps in a row, with this one, that were skipped because they were not finite.

    Steps that a smaller loss scale fixes are not counted.
    """
    loss_scale: float | None
    """Loss scale of this step's gradients; None: they had none."""
    drain_requested: bool
    """Whether any rank was asked to drain before this step."""
    profile_requested: bool = False
    """Whether rank 0 was asked for a profile before this step."""
    counted: dict[str, float] = field(default_factory=dict)
    """Counts in addition to the loss, by their names in metrics.jsonl."""


class PendingResult:
    """A step's result on its way from the device; reading it waits for that step, not a later."""

    def __init__(self, on_device: Tensor, names: Sequence[str] = ()) -> None:
        """Take the numbers of a result in order, and the names of those after the loss."""
        self._names = names
        self._event: torch.Event | None = None
        if on_device.device.type == "cpu":
            self._values = on_device
            return
        # Pinned: the host would wait for a copy into any other memory.
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
        loss, norm, targets, tokens, skipped, scale, drain, profile, *counted = (
            self._values.tolist()
        )
        return StepResult(
            loss=loss,
            grad_norm=norm,
            targets=round(targets),
            tokens=round(tokens),
            skipped_in_row=round(skipped),
            loss_scale=scale or None,
            drain_requested=drain > 0,
            profile_requested=profile > 0,
            counted=dict(zip(self._names, counted, strict=True)),
        )


class ExactSums(Protocol):
    """Sums of a step, none of whose bits depends on the ranks (``train/reproducible_step.py``)."""

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes; afterwards parameters have their gradients."""

    def sum_over_ranks(self, part: LossSums, *, others: Sequence[float], poisoned: bool) -> Totals:
        """The totals; the square of the gradients' norm is the first of the others."""

    def values(self) -> dict[str, int]:
        """Return the values for a checkpoint."""

    def load(self, values: Mapping[str, int]) -> None:
        """Continue from a checkpoint's values."""


class Stepper:
    """Runs optimizer steps of one model on this rank."""

    def __init__(
        self,
        task: Task | Computation[MicroBatch],
        optimizer: ShardOptimizer,
        mesh: Mesh,
        *,
        device: torch.device,
        grad_clip: float | None,
        ema: WeightEma | None = None,
        scaling: LossScaling | None = None,
        exact: ExactSums | None = None,
    ) -> None:
        """Args:
        scaling: What moves the loss scale; None: the format of the gradients needs none.
        exact: What adds up so that no bit depends on the ranks; None: sums are rounded.
        """
        self._computation = task.computation if isinstance(task, Task) else task
        self._optimizer = optimizer
        self._mesh = mesh
        self._device = device
        self._grad_clip = grad_clip
        self._ema = ema
        self.skipped_in_row = torch.zeros((), dtype=torch.float64, device=device)
        self.scaling = scaling
        self.exact = exact
        if scaling is not None:
            scaling.hand_to(self._computation.loss_scale)

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        lr: float,
        drain: bool,
        profile: bool = False,
        poisoned: bool = False,
    ) -> PendingResult:
        """Take one step.

        Args:
            drain: This rank's wish; the result holds that of all ranks.
            profile: The same of a profile (``train/profile.py``).
            poisoned: Put NaN into a gradient first, for a drill.
        """
        part = self.accumulate(batches)
        if poisoned:
            inject_nan(self._optimizer.gradients())
        # Ranks of tp, cp and pp read the same samples. One of them counts them for all.
        work = sum(batch.work for batch in batches) if self._mesh.speaks_for_samples else 0
        totals = self._totals(part, (work, float(drain), float(profile)), poisoned=poisoned)
        square_sum, tokens, drains, profiles = totals.others
        # Division by 1 instead of 0: such a step is skipped, and its numbers stay finite.
        is_empty, divisor = totals.divisor == 0, totals.divisor.clamp(min=1.0)
        loss = totals.loss_sum / divisor
        divisor, scale = self._with_scale(divisor)
        norm = square_sum.sqrt() / divisor
        not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._apply(norm, divisor=divisor, lr=lr, not_finite=not_finite, is_empty=is_empty)
        self._count_skipped(loss, norm)
        counted = totals.give_back(skipped=not_finite)
        if self._ema is not None:  # of running statistics too, which have just moved
            self._ema.follow(skip=not_finite | is_empty)
        loss = loss.masked_fill(is_empty, math.nan)  # the mean of nothing
        names = [name for each in self._computation.statistics for name in each.metrics]
        means = self._computation.means(totals.sums)
        values = [loss, norm, totals.divisor, tokens, self.skipped_in_row, scale, drains, profiles]
        return PendingResult(torch.stack([*values, *counted, *means.values()]), [*names, *means])

    def accumulate(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Add up undivided gradients; returns what this rank adds to loss sum and divisor."""
        if self.exact is not None:
            return self.exact.backward(batches)
        return self._computation.backward(batches)

    def _totals(self, part: LossSums, others: Sequence[float], *, poisoned: bool) -> Totals:
        if self.exact is not None:
            return self.exact.sum_over_ranks(part, others=others, poisoned=poisoned)
        with record_function(OPTIMIZER):
            square_sum = self._optimizer.square_sum()
        return sum_over_ranks(
            part,
            device=self._device,
            others=(square_sum, *others),
            statistics=self._computation.statistics,
        )

    def gradients(self) -> list[Tensor]:
        """Return the current gradients, undivided."""
        return self._optimizer.gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters, optimizer state and averages, also what no checkpoint holds."""
        averages = {} if self._ema is None else self._ema.tensors()
        return {**self._optimizer.tensors(), **averages}

    def begin(self) -> None:
        """Begin averages from the weights as they now are."""
        self._optimizer.begin()
        if self._ema is not None:
            self._ema.begin()

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """While it is open, the model has the weights that the optimizer's are evaluated by."""
        return self._optimizer.evaluation_weights()

    def synchronize(self) -> None:
        """Wait until what a checkpoint holds can be read, also where it lies in host memory."""
        self._optimizer.synchronize()

    def _with_scale(self, divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divisor of this step's gradients, and their loss scale; 0: there is none."""
        if self.scaling is None:
            return divisor, torch.zeros_like(divisor)
        return divisor * self.scaling.factor, self.scaling.scale.double()

    def _count_skipped(self, loss: Tensor, norm: Tensor) -> None:
        """Count a step that was not finite; one that the scale is to blame for moves that."""
        overflowed = ~torch.isfinite(norm)
        is_fault = ~torch.isfinite(loss)
        counted = (self.skipped_in_row + 1.0) * (is_fault | overflowed)
        if self.scaling is not None and self.scaling.moves:
            counted = torch.where(overflowed & ~is_fault, self.skipped_in_row, counted)
            self.scaling.update(overflowed=overflowed)
        self.skipped_in_row = counted

    def _apply(
        self, norm: Tensor, *, divisor: Tensor, lr: float, not_finite: Tensor, is_empty: Tensor
    ) -> None:
        """Divide, clip and apply the gradients.

        Skip the step if it is not finite. Skip it too if it had no losses (dialogues without an
        answer), which is no fault and not counted.
        """
        if self._grad_clip is not None:
            # g / divisor * clip / norm, as one division: clipping costs no pass over the gradients.
            divisor = divisor * (norm / self._grad_clip).clamp(min=1.0)
        with record_function(OPTIMIZER):
            self._optimizer.step(lr=lr, divisor=divisor, skip=not_finite | is_empty)
