"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): second moments of rows and of columns.

Of a matrix the average of squared gradients is kept for each row and each column, and its elements
are estimated from both. Algorithm 4 without the parts that set a learning rate: the rate is that of
the schedule, as with ``relative_step`` and ``scale_parameter`` off in transformers, and there is no
average of gradients. Norms, biases and convolutions have an average for each element.

Rows, columns and the root mean square that clips a step are those of the whole matrix, in every
layout. Each expert of a block is a matrix of its own. Decay is decoupled.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.config.optimizers import MATRICES, param_kind
from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.parallel.matrix_squares import MatrixSquares
from shardyard.torch_private import foreach_add_, foreach_div_
from shardyard.train.optimizers import State, gradients

_DECAY_POWER = -0.8
"""Averages follow the n-th step by n to this power (section 7.2)."""
_EPS = 1e-30
"""Added to squares (algorithm 4)."""
_MOST_RMS = 1.0
"""Largest root mean square of a step before the learning rate (section 6)."""


class Adafactor:
    """The direction of a shard waits in the memory of its gradient until its norm is known."""

    most_elements = math.inf

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        self._shards = shards
        self._norms = norms
        self._decay = float(optim.weight_decay)
        self._decays_vectors = optim.decay_vectors
        self._shapes = {name: tuple(norms.params[name].shape) for name in shards}
        self._matrices = {
            name: norms.params[name]
            for name, shard in shards.items()
            if param_kind(name, shard.dim()) in MATRICES
        }
        self._squares = MatrixSquares(self._matrices)
        self._per_matrix: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """Sum squares over rows and columns; every rank calls it, also one without a step."""
        self._skip = skip.bool()
        self._divisor = divisor.double()
        self._rate = lr * (1.0 - skip.double())
        parts = {name: grads[name] for name in self._matrices if name in grads}
        self._sums = self._squares.of(parts)
        self._roots: dict[str, Tensor] = {}

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take some of the shards."""
        moving = [name for name in names if self._shards[name].grad is not None]
        if not moving:
            return
        grads = gradients(self._shards, moving)
        foreach_div_(grads, self._divisor.float())
        for grad in grads:  # one that is not finite must not touch the averages
            grad.masked_fill_(self._skip, 0.0)
        counts = [states[name]["step"] for name in moving]
        foreach_add_(counts, (~self._skip).float())
        # 0 in a skipped step, of which averages keep their bits
        shares = torch.stack(counts).double().clamp(min=1.0) ** _DECAY_POWER * ~self._skip
        for name, grad, share in zip(moving, grads, shares.float().unbind(), strict=True):
            if name in self._matrices:
                self._scale_matrix(name, grad, states[name], share)
            else:
                average = states[name]["exp_avg_sq"].lerp_(grad.square() + _EPS, share)
                grad.mul_(average.clamp(min=_EPS).rsqrt())
                self._roots[name] = grad.new_zeros(0)

    def _scale_matrix(self, name: str, grad: Tensor, state: State, share: Tensor) -> None:
        """Scale a gradient by its row and its column, and not yet by the mean over all of it."""
        *_, rows, columns = self._shapes[name]
        means = zip(self._sums[name], (columns, rows), strict=True)
        by_row, by_column = (self._finite(each / number) for each, number in means)
        row = state["exp_avg_sq_row"].lerp_(by_row, share)
        column = state["exp_avg_sq_col"].lerp_(by_column, share)
        grad.mul_(row.clamp(min=_EPS).rsqrt().unsqueeze(-1))
        grad.mul_(column.clamp(min=_EPS).rsqrt().unsqueeze(-2))
        # the squares of these, summed over all ranks, are the sum over rows: each counts once
        self._roots[name] = (row / self._squares.holders_of_rows(name)).sqrt()

    def _finite(self, means: Tensor) -> Tensor:
        """Means of squares of divided gradients; zeros in a skipped step."""
        return (means / self._divisor.square() + _EPS).masked_fill(self._skip, 0.0).float()

    def finish(self) -> None:
        """Sum once over all ranks; every rank calls it, also one without a step."""
        names = [name for name in self._shards if name in self._roots]
        directions = gradients(self._shards, names)
        norms, roots = self._norms.of(names, directions, [self._roots[name] for name in names])
        elements, rows = self._counts(names)
        # rows are 0 of what is no matrix
        scale = torch.where(rows > 0, roots / rows.clamp(min=1.0).sqrt(), 1.0)
        rms = norms * scale / elements.sqrt()
        factors = self._rate * scale / (rms / _MOST_RMS).clamp(min=1.0)
        # of a skipped step they need not be numbers
        factors = torch.where(self._skip, 0.0, factors).float()
        weights = [self._shards[name].data for name in names]
        for weight, direction, factor in zip(
            weights, directions, self._norms.by_name(names, factors), strict=True
        ):
            if self._decay and (weight.dim() >= 2 or self._decays_vectors):
                weight.mul_(1.0 - self._rate.float() * self._decay)
            weight.sub_(direction.mul_(factor))
        for shard in self._shards.values():
            shard.grad = None
        self._roots.clear()

    def _counts(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Elements and rows of each matrix, copied to the device once: a copy waits for it."""
        key = tuple(names)
        if key not in self._per_matrix:
            is_matrix = {name: name in self._matrices for name in names}
            shapes = {name: self._shapes[name] for name in names}
            elements = {
                name: float(math.prod(each[-2:] if is_matrix[name] else each))
                for name, each in shapes.items()
            }
            rows = {n: float(each[-2]) if is_matrix[n] else 0.0 for n, each in shapes.items()}
            self._per_matrix[key] = (
                self._norms.per_matrix(names, elements),
                self._norms.per_matrix(names, rows),
            )
        return self._per_matrix[key]
