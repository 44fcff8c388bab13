"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): an average in place of a decay.

Three sequences of weights: z takes the steps, x is their average, and gradients are taken at
y = (1 - beta1) z + beta1 x. As in the authors' package ``schedulefree``, y is the parameter, z is
next to it and x follows from both: evaluations and exports take x (``evaluation_share`` of the
rows). A step weighs by the square of the highest learning rate so far, so that those of the warm-up
count for less.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardyard.config.optimizers import UNAVERAGED
from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.torch_private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div_,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
)
from shardyard.train.optimizers import State, gradients


class _Factors(NamedTuple):
    """Numbers of each shard in a step."""

    roots: list[Tensor]
    """Root of the divisor of an average of squares that began at 0."""
    shares: list[Tensor]
    """Share of the way to z that y moves; 0 in a skipped step."""
    rates: list[Tensor]
    """Factor of the direction that is added to y; 0 in a skipped step."""


class ScheduleFreeAdamW:
    """The direction of a shard is made in the memory of its gradient."""

    most_elements = 2**26
    """Most elements at once; the divisors of their directions, 256 MiB, are held next to them."""

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        del norms  # each element by itself
        self._shards = shards
        self._betas, self._eps = optim.betas, optim.eps
        self._decay = float(optim.weight_decay)
        self._decays_vectors = optim.decay_vectors

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins."""
        del grads  # each comes with its shard
        self._skip = skip.bool()
        self._divisor = divisor.float()
        self._lr = lr
        self._rate = (lr * (1.0 - skip.double())).float()

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take some of the shards."""
        moving = [name for name in names if self._shards[name].grad is not None]
        if not moving:
            return
        grads = gradients(self._shards, moving)
        foreach_div_(grads, self._divisor)
        for grad in grads:  # one that is not finite must not touch the average
            grad.masked_fill_(self._skip, 0.0)
        squares = [states[name]["exp_avg_sq"] for name in moving]
        # Of a skipped step the factor is 1 and the gradient 0: the average keeps its bits.
        foreach_mul_(squares, torch.where(self._skip, 1.0, self._betas[1]))
        foreach_addcmul_(squares, grads, grads, value=1.0 - self._betas[1])
        factors = self._factors([states[name] for name in moving])
        divisors = foreach_sqrt(squares)
        foreach_div_(divisors, factors.roots)
        foreach_add_(divisors, self._eps)
        foreach_div_(grads, divisors)
        shards = [self._shards[name] for name in moving]
        self._add_decay(shards, grads)
        weights = [shard.data for shard in shards]
        unaveraged = [states[name][UNAVERAGED] for name in moving]
        for weight, other, share in zip(weights, unaveraged, factors.shares, strict=True):
            weight.lerp_(other, share)
        for weight, direction, rate in zip(weights, grads, factors.rates, strict=True):
            weight.addcmul_(direction, rate)
        foreach_mul_(grads, self._rate)
        foreach_sub_(unaveraged, grads)
        for shard in shards:
            shard.grad = None

    def finish(self) -> None:
        """Each part was finished when it was given."""

    def _add_decay(self, shards: Sequence[nn.Parameter], directions: Sequence[Tensor]) -> None:
        """Weights decay by what they are at y, as the authors' do by default."""
        pairs = zip(shards, directions, strict=True)
        decaying = [pair for pair in pairs if pair[0].dim() >= 2 or self._decays_vectors]
        if decaying and self._decay:
            weights = [shard.data for shard, _ in decaying]
            foreach_add_([each for _, each in decaying], weights, alpha=self._decay)

    def _factors(self, states: Sequence[State]) -> _Factors:
        """Count the step, and return its numbers, made in fp64."""
        taken = (~self._skip).double()
        counts = [state["step"] for state in states]
        foreach_add_(counts, taken.float())
        steps = torch.stack(counts).double()
        # before the first step that is taken there is nothing to correct
        squares = torch.where(steps > 0, 1.0 - self._betas[1] ** steps, 1.0)
        rates, sums = (
            [state["lr_max"] for state in states],
            [state["weight_sum"] for state in states],
        )
        highest = torch.stack(rates).clamp(min=self._lr * taken)
        weights = highest.square() * taken
        total = torch.stack(sums) + weights
        for held, new in zip((*rates, *sums), (*highest.unbind(), *total.unbind()), strict=True):
            held.copy_(new)
        shares = torch.where(total > 0, weights / total, 0.0)
        along = self._lr * taken * (self._betas[0] * (1.0 - shares) - 1.0)
        return _Factors(*(list(each.float().unbind()) for each in (squares.sqrt(), shares, along)))
