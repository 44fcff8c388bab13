"""A step whose every bit is free of order: ``precision.reduce=exact``.

Gradients are integers on their way (``parallel/reproducible_sums.py``), losses and statistics too
(``parallel/reproducible_sums.py``). A step makes two small all-reduces instead of one: the largest
contributions and sums, which the host reads to decide whether the step fits its scales, and then
losses, counts, statistics and squares of gradients. A step that does not fit is computed again from
the same micro-batches, on all ranks; so is the first one, which finds the scales.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.data.loader import MicroBatch
from shardyard.errors import TrainingError
from shardyard.parallel.reproducible_sums import PLACES, ExactGradients, of_integers, to_integers
from shardyard.tasks.loss_computation import Computation, LossSums
from shardyard.train.loss_reduction import Totals

_SQUARE_BITS = 40
"""Bits of a square, below that of the largest element of the parameter's gradient."""
_AT_ONCE = 2**20
"""Squares added up at once: 60 bits, and what a processor keeps near."""
_HALF_BITS = 31
"""A sum of squares travels in two halves, of which 2^31 can be added up."""
_LEAST_EXPONENT = -100


class ExactStep:
    """Computes micro-batches until they fit their scales, and adds up what they came to."""

    def __init__(
        self,
        computation: Computation[MicroBatch],
        gradients: ExactGradients,
        *,
        device: torch.device,
    ) -> None:
        """Take a computation whose model has its storage and no pipeline."""
        computation.watch(self)
        self._computation = computation
        self._gradients = gradients
        self._device = device
        self._sums_nP: Tensor | None = None
        """Loss of this rank, followed by the statistics."""
        self._largest: dict[str, float] = {}
        """Element of each gradient, of all ranks."""
        self._is_finite = True

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of a step; afterwards parameters have their gradients.

        Waits for the device. All ranks call it together.

        Raises:
            TrainingError: A step that was computed again came out otherwise.
        """
        part, contributions = self._pass(batches)
        if self._is_finite and not self._gradients.fits(contributions):
            self._gradients.follow(contributions)
            before = contributions
            part, contributions = self._pass(batches)
            # Maxima have no order, so a difference means that a kernel is not deterministic.
            if contributions != before:
                raise _not_the_same(before, contributions)
        self._gradients.hand_over()
        if self._is_finite:
            self._gradients.follow(contributions)
        return part

    def _pass(self, batches: Sequence[MicroBatch]) -> tuple[LossSums, dict[str, float]]:
        """Compute all micro-batches; returns each parameter's largest contribution to the step."""
        self._sums_nP = None
        self._gradients.begin()
        part = self._computation.backward(batches)
        found = self._gradients.largest()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        # The host waits here, once a step: what it gives to the device next depends on these.
        contributions, sums = found.tolist()
        names = self._gradients.names
        self._largest = dict(zip(names, sums, strict=True))
        self._is_finite = max([*contributions, *sums]) <= torch.finfo(torch.float32).max
        return part, dict(zip(names, contributions, strict=True))

    def before_backward(self, *, is_last: bool) -> None:
        """The backward pass of a micro-batch comes."""
        self._gradients.before_backward(is_last=is_last)

    def after_backward(self, loss: Tensor) -> None:
        """It is over: add up its loss, and what modules have counted in it."""
        self._gradients.after_backward()
        rows = [each.take(self._device) for each in self._computation.statistics]
        # Integers before any sum: the number of micro-batches of a rank must not change a bit.
        told_nP = to_integers(torch.cat([loss.detach().double().view(1), *rows]))
        self._sums_nP = told_nP if self._sums_nP is None else self._sums_nP + told_nP

    def sum_over_ranks(self, part: LossSums, *, others: Sequence[float], poisoned: bool) -> Totals:
        """The totals of the step just computed. All ranks call it together.

        Args:
            others: As of ``totals.sum_over_ranks``; the square of the gradients' norm comes first
                in ``Totals.others``, before them.
            poisoned: Whether this rank's gradients were broken since, for a drill.
        """
        statistics = self._computation.statistics
        counts = torch.tensor(
            [float(part.divisor), *others, math.nan if poisoned else 0.0],
            dtype=torch.float64,
            device=self._device,
        )
        assert self._sums_nP is not None
        told_nP = torch.cat([to_integers(counts), self._sums_nP])
        squares_N2 = self._squares()
        flat = torch.cat([told_nP.view(-1), squares_N2.view(-1)])
        dist.all_reduce(flat)
        told, squares = torch.split(flat, [told_nP.numel(), squares_N2.numel()])
        sizes = [1, len(others), 1, 1, *(each.size for each in statistics)]
        summed = torch.split(of_integers(told.view(-1, PLACES)), sizes)
        divisor, summed_others, poison, loss_sum, *rows = summed
        square_sum = self._square_sum(squares.view(-1, 2)) + poison
        return Totals(
            loss_sum=loss_sum[0],
            divisor=divisor[0],
            sums={},
            others=torch.cat([square_sum, summed_others]),
            rows=list(zip(statistics, rows, strict=True)),
        )

    def values(self) -> dict[str, int]:
        """Return values for a checkpoint: without them the next step would round differently."""
        return dict(self._gradients.exponents)

    def load(self, values: Mapping[str, int]) -> None:
        """Continue from a checkpoint's values."""
        self._gradients.exponents = dict(values)

    def _squares(self) -> Tensor:
        """Sums of squares of what this rank has of each gradient, int64 (parameters, halves)."""
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        halves = []
        for name, largest in self._largest.items():
            low, high = nothing, nothing
            # Half of the bits, as the square has twice as many.
            scale = 2.0 ** (_SQUARE_BITS // 2 - _exponent(largest))
            for part in torch.split(self._gradients.own(name), _AT_ONCE):
                scaled = part * scale
                found = scaled.mul_(scaled).round_().to(torch.int64).sum()
                low = low + (found & (2**_HALF_BITS - 1))
                high = high + (found >> _HALF_BITS)
            halves.append(torch.stack([low, high]))
        return torch.stack(halves)

    def _square_sum(self, halves_N2: Tensor) -> Tensor:
        """Square of the norm of all gradients, fp64; NaN where one is not finite."""
        if not self._is_finite:
            return torch.full((), torch.nan, dtype=torch.float64, device=self._device)
        units = [2.0 ** (2 * _exponent(each) - _SQUARE_BITS) for each in self._largest.values()]
        units_N = torch.tensor(units, dtype=torch.float64, device=self._device)
        low_N, high_N = halves_N2.double().unbind(dim=1)
        return ((high_N * 2.0**_HALF_BITS + low_N) * units_N).sum()


def _exponent(largest: float) -> int:
    """All elements are at most 2^exponent; not so small that a power of two leaves fp32."""
    return max(math.frexp(largest)[1], _LEAST_EXPONENT)


def _not_the_same(before: Mapping[str, float], after: Mapping[str, float]) -> TrainingError:
    name = next(name for name in before if before[name] != after[name])
    return TrainingError(
        f"precision.reduce=exact: a step was computed again, and the largest gradient of {name} "
        f"was {after[name]!r} instead of {before[name]!r}. Something computes otherwise the second "
        "time (a kernel that is not deterministic, a damaged device), so no run could be repeated. "
        "Use precision.reduce=fp32, or find it: shardyard doctor."
    )
