"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): steps by the sign of an average.

Each element moves by the learning rate, up or down, so one average is all its state. Decay is
decoupled, as with AdamW here.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.torch_private import foreach_add_, foreach_div_, foreach_mul_, foreach_sub_
from shardyard.train.optimizers import State, gradients


class Lion:
    """The direction of a shard is made next to its gradient."""

    most_elements = 2**26
    """Most elements at once; their directions, 256 MiB, are held next to them."""

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        del norms  # each element by itself
        self._shards = shards
        self._betas = optim.betas
        self._decay = float(optim.weight_decay)
        self._decays_vectors = optim.decay_vectors

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins."""
        del grads  # each comes with its shard
        self._skip = skip.bool()
        self._divisor = divisor.float()
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
        means = [states[name]["exp_avg"] for name in moving]
        slow, slower = self._betas
        directions = [
            (mean * slow).add_(grad, alpha=1.0 - slow).sign_()
            for mean, grad in zip(means, grads, strict=True)
        ]
        # Of a skipped step the factor is 1 and the gradient 0: the average keeps its bits.
        foreach_mul_(means, torch.where(self._skip, 1.0, slower))
        foreach_add_(means, grads, alpha=1.0 - slower)
        shards = [self._shards[name] for name in moving]
        decaying = [each.data for each in shards if each.dim() >= 2 or self._decays_vectors]
        if decaying and self._decay:
            foreach_mul_(decaying, 1.0 - self._rate * self._decay)
        foreach_mul_(directions, self._rate)
        foreach_sub_([shard.data for shard in shards], directions)
        for shard in shards:
            shard.grad = None

    def finish(self) -> None:
        """Each part was finished when it was given."""
