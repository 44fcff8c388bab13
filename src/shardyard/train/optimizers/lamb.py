"""LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2): Adam's direction, scaled by matrix.

Each matrix moves by its own norm times the learning rate, independent of the norm of its
direction. The scale is the ratio of two norms of the whole parameter, so it is known only
after a sum over all ranks that split it. ``update`` makes directions, ``finish`` asks for
all norms at once and steps. Norms and biases neither decay nor are scaled, as in the
authors' own code. Each expert of a block is a matrix of its own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.torch_private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div_,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
)
from shardyard.train.optimizers import State, gradients


class LAMB:
    """The direction of a shard waits in the memory of its gradient."""

    most_elements = 2**26
    """Most elements at once; square roots of the second moment, 256 MiB, are held next to them."""

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        self._shards = shards
        self._betas, self._eps = optim.betas, optim.eps
        self._decay = float(optim.weight_decay)
        self._norms = norms

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        del grads  # each comes with its shard
        self._skip = skip.bool()
        self._divisor = divisor.float()
        self._rate = lr * (1.0 - skip.double())
        self._moving: list[str] = []

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        moving = [name for name in names if self._shards[name].grad is not None]
        if not moving:
            return
        self._moving += moving
        grads = self._directions(moving)
        foreach_div_(grads, self._divisor)
        for grad in grads:  # one that is not finite must not touch the averages
            grad.masked_fill_(self._skip, 0.0)
        mean = [states[name]["exp_avg"] for name in moving]
        square = [states[name]["exp_avg_sq"] for name in moving]
        slow, slower = (torch.where(self._skip, 1.0, beta) for beta in self._betas)
        foreach_mul_(mean, slow)
        foreach_add_(mean, grads, alpha=1.0 - self._betas[0])
        foreach_mul_(square, slower)
        foreach_addcmul_(square, grads, grads, value=1.0 - self._betas[1])
        counts = [states[name]["step"] for name in moving]
        foreach_add_(counts, (~self._skip).float())
        first, second = self._corrections(counts)
        roots = foreach_sqrt(square)
        foreach_div_(roots, second)
        foreach_add_(roots, self._eps)
        foreach_copy_(grads, mean)
        foreach_div_(grads, roots)
        foreach_div_(grads, first)
        matrices = self._matrices(moving)
        if matrices and self._decay:
            weights = [self._shards[name].data for name in matrices]
            foreach_add_(self._directions(matrices), weights, alpha=self._decay)

    def finish(self) -> None:
        """Sum once over all ranks; every rank calls it, also one without a step."""
        matrices = self._matrices(self._moving)
        weights = [self._shards[name].data for name in matrices]
        norms = self._norms.of(matrices, weights, self._directions(matrices))
        # a weight of zeros would never move, and a direction of zeros has no scale
        has_scale = (norms > 0).all(dim=0)
        scales = torch.where(has_scale, norms[0] / norms[1], 1.0)
        of_matrices = self._norms.by_name(matrices, (self._rate * scales).float())
        rates = dict(zip(matrices, of_matrices, strict=True))
        if self._moving:
            steps = self._directions(self._moving)
            rate = self._rate.float()
            foreach_mul_(steps, [rates.get(name, rate) for name in self._moving])
            foreach_sub_([self._shards[name].data for name in self._moving], steps)
        for shard in self._shards.values():
            shard.grad = None

    def _corrections(self, counts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the divisor of an average that began at 0, and its root for squares.

        fp64: in fp32 1 - beta is off by 1e-6 at the first step.
        """
        steps = torch.stack(list(counts)).double()
        first, second = (
            # before the first step that is taken there is nothing to correct
            torch.where(steps > 0, 1.0 - beta**steps, 1.0)
            for beta in self._betas
        )
        return list(first.float().unbind()), list(second.sqrt().float().unbind())

    def _directions(self, names: Sequence[str]) -> list[Tensor]:
        return gradients(self._shards, names)

    def _matrices(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._shards[name].dim() >= 2]
