"""AdamW and SGD by torch's fused optimizers, on the local shards as plain tensors.

On DTensors there is no fused SGD, every call pays for a dispatch in Python, and fused AdamW has
been seen to leak host memory (pytorch/torchtitan issue 3790).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.torch_private import foreach_mul_
from shardyard.train.optimizers import State


class _Fused:
    """One of torch's, which divides and skips by itself."""

    most_elements = math.inf

    def __init__(
        self,
        shards: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        decoupled_decay: float = 0.0,
    ) -> None:
        """Args:
        decoupled_decay: Decay of matrices that torch's optimizer does not do.
        """
        self._shards = shards
        self._optimizer = optimizer
        self._decoupled_decay = decoupled_decay

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        del grads  # each comes with its shard
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        fused: Any = self._optimizer  # fused optimizers read these two attributes
        # torch.amp.GradScaler sets the same two: the kernel divides by grad_scale, and does nothing
        # where found_inf is 1. Both are read on the device.
        fused.grad_scale = divisor.float()
        fused.found_inf = skip.float()
        # The skip is part of it: found_inf covers only the decay that torch does itself.
        self._decay_factor = 1.0 - lr * self._decoupled_decay * (1.0 - skip.float())

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        shards = [self._shards[name] for name in names]
        decaying = [shard.data for shard in shards if shard.dim() >= 2 and shard.grad is not None]
        if self._decoupled_decay and decaying:
            foreach_mul_(decaying, self._decay_factor)
        for name, shard in zip(names, shards, strict=True):
            self._optimizer.state[shard] = states[name]
        self._optimizer.step()  # it skips those that it is given no gradient of
        # Kept here, the states would hold device memory that the offload wants back.
        self._optimizer.state.clear()
        for shard in shards:
            shard.grad = None

    def finish(self) -> None:
        """Each part was finished when it was given."""


class AdamW(_Fused):
    """Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2."""

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        del norms  # each element by itself
        decay = float(optim.weight_decay)
        of_vectors, all_ = decay * optim.decay_vectors, shards.values()
        groups: list[dict[str, Any]] = [
            {"params": [shard for shard in all_ if shard.dim() >= 2]},
            {"params": [shard for shard in all_ if shard.dim() < 2], "weight_decay": of_vectors},
        ]
        made = torch.optim.AdamW(
            groups,
            lr=float(optim.lr),
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=decay,
            fused=True,
        )
        super().__init__(shards, made)


class SGD(_Fused):
    """With momentum, Nesterov's too, and decoupled decay (arXiv:1711.05101, algorithm 1).

    torch's own decay would go into the gradient, and so into the momentum.
    """

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        del norms  # each element by itself
        made = torch.optim.SGD(
            [{"params": list(shards.values())}],  # a stage may train nothing
            lr=float(optim.lr),
            momentum=optim.momentum,
            nesterov=optim.nesterov,
            fused=True,
        )
        super().__init__(shards, made, decoupled_decay=float(optim.weight_decay))
