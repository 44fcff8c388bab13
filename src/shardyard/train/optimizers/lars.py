"""LARS (You, Gitman, Ginsburg 2017, arXiv:1708.03888, algorithm 1): SGD, a rate for each matrix.

The rate of a matrix is the learning rate times ``trust_coefficient`` |w| / (|g| + decay |w|), so
that a step is a like share of every matrix. It goes into the momentum, and both norms are of the
whole parameter: they are known after a sum over all ranks that split it, before anything moves.
Norms and biases have the learning rate itself, and do not decay. Each expert of a block is a matrix
of its own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.torch_private import foreach_add_, foreach_div_, foreach_mul_, foreach_sub_
from shardyard.train.optimizers import State, gradients


class LARS:
    """One step of a shard is made in the memory of its gradient."""

    most_elements = 2**26
    """Most elements at once; their updates, 256 MiB, are held next to them."""

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        self._shards = shards
        self._momentum = optim.momentum
        self._trust = optim.trust_coefficient
        self._decay = float(optim.weight_decay)
        self._norms = norms

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """Sum once over all ranks; every rank calls it, also one without a step."""
        self._skip = skip.bool()
        self._divisor = divisor.float()
        matrices = [name for name in grads if grads[name].dim() >= 2]
        weights = [self._shards[name].data for name in matrices]
        # The gradients are still undivided here: dividing one norm of each is cheaper.
        of_weights, of_grads = self._norms.of(matrices, weights, [grads[n] for n in matrices])
        of_grads = of_grads / divisor
        # a weight of zeros would never move, and a gradient of zeros has no scale
        has_scale = (of_weights > 0) & (of_grads > 0)
        trust = self._trust * of_weights / (of_grads + self._decay * of_weights)
        rates = lr * torch.where(has_scale, trust, 1.0)
        # of a skipped step the norms need not be numbers
        rates = torch.where(self._skip, 0.0, rates).float()
        self._rates = dict.fromkeys(grads, torch.where(self._skip, 0.0, lr).float())
        self._rates |= dict(zip(matrices, self._norms.by_name(matrices, rates), strict=True))

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        moving = [name for name in names if name in self._rates]
        if not moving:
            return
        grads = gradients(self._shards, moving)
        foreach_div_(grads, self._divisor)
        for grad in grads:  # one that is not finite must not touch the momentum
            grad.masked_fill_(self._skip, 0.0)
        matrices = [name for name in moving if self._shards[name].dim() >= 2]
        if matrices and self._decay:
            decaying = [self._shards[name].data for name in matrices]
            foreach_add_(gradients(self._shards, matrices), decaying, alpha=self._decay)
        foreach_mul_(grads, [self._rates[name] for name in moving])
        if self._momentum:
            velocities = [states[name]["momentum_buffer"] for name in moving]
            foreach_mul_(velocities, torch.where(self._skip, 1.0, self._momentum))
            foreach_add_(velocities, grads)
            grads = velocities
        kept = (~self._skip).float()
        foreach_sub_([self._shards[name].data for name in moving], [kept * each for each in grads])

    def finish(self) -> None:
        for shard in self._shards.values():
            shard.grad = None
