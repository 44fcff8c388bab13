"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum.

The momentum of each matrix of a block is replaced by the nearest semi-orthogonal matrix, so that
all its singular directions move alike. Its size is set to that of AdamW's steps, as Moonlight does
(arXiv:2502.16982, equation 4), so that a learning rate of AdamW fits. AdamW takes embeddings, head,
norms and biases.

The nearest semi-orthogonal matrix is one of the whole matrix, whatever the layout. Each expert of a
block is a matrix of its own.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.config.optimizers import param_kind
from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.parallel.whole_matrices import WholeMatrices
from shardyard.torch_private import foreach_add_, foreach_div_, foreach_mul_
from shardyard.train.optimizers import State, gradients
from shardyard.train.optimizers.fused import AdamW

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in an iteration, as its author chose them: steepest at 0."""
_ITERATIONS = 5
_EPS = 1e-7
"""Least norm of a matrix, as torch.optim.Muon."""
_RMS = 0.2
"""Root mean square of a step of AdamW, before the learning rate (arXiv:2502.16982, section 2.2)."""


class Muon:
    """The direction of a shard waits in the memory of its gradient until all are known."""

    most_elements = math.inf

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        self._shards = shards
        self._matrices = {
            name: norms.params[name]
            for name, shard in shards.items()
            if param_kind(name, shard.dim()) == "block matrix"
        }
        others = {name: each for name, each in shards.items() if name not in self._matrices}
        self._adamw = AdamW(others, optim, norms)
        self._momentum, self._decay = optim.momentum, float(optim.weight_decay)
        device = next((each.device for each in shards.values()), torch.device("cpu"))
        # Accelerators multiply bf16 much faster than fp32; CPUs mostly do not.
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._whole = WholeMatrices(self._matrices, dtype=dtype)

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins."""
        self._adamw.begin(lr=lr, divisor=divisor, skip=skip, grads=grads)
        self._skip = skip.bool()
        self._divisor = divisor.float()
        self._rate = (lr * (1.0 - skip.double())).float()
        self._moving: set[str] = set()

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take some of the shards."""
        self._adamw.update([name for name in names if name not in self._matrices], states)
        moving = [
            name for name in names if name in self._matrices and self._shards[name].grad is not None
        ]
        if not moving:
            return
        self._moving.update(moving)
        grads = gradients(self._shards, moving)
        foreach_div_(grads, self._divisor)
        for grad in grads:  # one that is not finite must not touch the average
            grad.masked_fill_(self._skip, 0.0)
        foreach_add_([states[name]["step"] for name in moving], (~self._skip).float())
        if not self._momentum:
            return
        averages = [states[name]["momentum_buffer"] for name in moving]
        # Of a skipped step the factor is 1 and the gradient 0: the average keeps its bits.
        foreach_mul_(averages, torch.where(self._skip, 1.0, self._momentum))
        foreach_add_(averages, grads, alpha=1.0 - self._momentum)
        foreach_mul_(grads, 1.0 - self._momentum)  # Nesterov's direction
        foreach_add_(grads, averages, alpha=self._momentum)

    def finish(self) -> None:
        """Make the directions orthogonal and step. All ranks call it, also one without a step."""
        names = list(self._matrices)
        for name, direction in self._whole.apply(names, self._directions(names), orthogonalized):
            if name in self._moving:
                weight, whole = self._shards[name].data, self._matrices[name].shape
                weight.mul_(1.0 - self._rate * self._decay)
                rate = self._rate * (_RMS * math.sqrt(max(whole[-2:])))
                weight.sub_(direction.to(weight.dtype) * rate)
        for shard in self._shards.values():
            shard.grad = None

    def _directions(self, names: Sequence[str]) -> dict[str, Tensor]:
        directions = {}
        for name in names:
            shard = self._shards[name]
            directions[name] = torch.zeros_like(shard.data) if shard.grad is None else shard.grad
        return directions


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return about the nearest semi-orthogonal matrix of each: singular values of 0.7 to 1.2.

    Args:
        matrices: (..., rows, columns).
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
