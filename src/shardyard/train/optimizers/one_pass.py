"""AdamW of one rank in one pass: it divides, skips, updates and writes the copies that compute.

On CUDA one kernel does it (``adamw_kernel.py``); elsewhere the same steps in plain torch, which the
kernel is held to.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.parallel.device import has_triton
from shardyard.torch_private import foreach_add_
from shardyard.train.optimizers import State

SCALARS = ("step_size", "root", "divisor", "skip", "kept")
"""Scalars of each parameter, in this order, fp32.

The learning rate over the first average's correction; the root of the second's; the divisor
of the gradient; 1 where the parameter must not move; the factor that decay leaves.
"""

_AT_ONCE = 2**24
"""Elements that plain torch takes at a time: 64 MiB of each number next to them."""


class OnePassAdamW:
    """Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2: as ``fused.OnePassAdamW``."""

    most_elements = math.inf

    def __init__(
        self, shards: Mapping[str, nn.Parameter], optim: Optim, copies: Mapping[str, Tensor]
    ) -> None:
        """Args:
        copies: Name -> the copy of a shard that has one.
        """
        self._shards = shards
        self._copies = copies
        self._betas, self._eps = optim.betas, optim.eps
        self._decay = float(optim.weight_decay)
        self._decay_of_vectors = self._decay * optim.decay_vectors

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins."""
        del grads  # each comes with its shard
        self._lr, self._divisor, self._skip = lr, divisor.double(), skip.double()

    @torch.no_grad()
    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take some of the shards."""
        moving = [name for name in names if self._shards[name].grad is not None]
        if not moving:
            return
        rows = self._scalars(moving, [states[name]["step"] for name in moving])
        for name, row in zip(moving, rows, strict=True):
            shard, state = self._shards[name], states[name]
            assert shard.grad is not None
            take = _by_kernel if has_triton(shard.device) else update_plainly
            take(
                shard.grad, shard.data, state["exp_avg"], state["exp_avg_sq"],
                self._copies.get(name), row, betas=self._betas, eps=self._eps,
            )  # fmt: skip
            shard.grad = None

    def _scalars(self, names: Sequence[str], steps: list[Tensor]) -> Tensor:
        """``SCALARS`` of each, a row each; counts the step where it is not skipped."""
        foreach_add_(steps, (1.0 - self._skip).float())
        first, second = self._betas
        # fp64: at the first steps 1 - beta^t would lose digits in fp32.
        taken_N = torch.stack(steps).double()
        dims = (self._shards[name].dim() for name in names)
        decays = [self._decay if dim >= 2 else self._decay_of_vectors for dim in dims]
        kept_N = torch.tensor([1.0 - self._lr * decay for decay in decays], dtype=torch.float64).to(
            taken_N.device, non_blocking=True
        )
        columns = (
            self._lr / (1.0 - first**taken_N),
            (1.0 - second**taken_N).sqrt(),
            self._divisor.expand_as(taken_N),
            self._skip.expand_as(taken_N),
            kept_N,
        )
        return torch.stack(columns, dim=1).float()

    def finish(self) -> None:
        """Each part was finished when it was given."""


def update_plainly(
    grad: Tensor,
    weight: Tensor,
    average: Tensor,
    square: Tensor,
    copy: Tensor | None,
    scalars: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One parameter in place, by ``SCALARS``: what the kernel does, step by step."""
    step_size, root, divisor, skip, kept = scalars.unbind()
    is_skipped = skip != 0
    parts = [torch.split(each.view(-1), _AT_ONCE) for each in (grad, weight, average, square)]
    for g, w, m, v in zip(*parts, strict=True):
        divided = g / divisor
        new_m = torch.lerp(m, divided, 1.0 - betas[0])
        new_v = v * betas[1] + (1.0 - betas[1]) * divided * divided
        new_w = w * kept - step_size * new_m / (new_v.sqrt() / root + eps)
        # A choice and no product: 0 times NaN is NaN, and a skipped step must change no bit.
        for held, new in ((m, new_m), (v, new_v), (w, new_w)):
            held.copy_(torch.where(is_skipped, held, new))
    if copy is not None:
        copy.copy_(weight)


def _by_kernel(
    grad: Tensor,
    weight: Tensor,
    average: Tensor,
    square: Tensor,
    copy: Tensor | None,
    scalars: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    from shardyard.train.optimizers.adamw_kernel import update  # triton: torch brings it with CUDA

    update(grad, weight, average, square, copy, scalars, betas=betas, eps=eps)
