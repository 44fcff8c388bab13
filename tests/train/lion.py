"""Lion by hand, from the paper: the reference of its tests."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Lion:
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2, in fp64."""

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        decay: float,
        betas: tuple[float, float] = (0.9, 0.99),
        decays_vectors: bool = False,
    ) -> None:
        self.params = list(params)
        self.lr, self.decay, self.betas = lr, decay, betas
        self.decays_vectors = decays_vectors
        self.averages = [torch.zeros_like(param, dtype=torch.float64) for param in self.params]

    @torch.no_grad()
    def step(self) -> None:
        """One update from ``.grad``."""
        slow, slower = self.betas
        for param, average in zip(self.params, self.averages, strict=True):
            assert param.grad is not None
            weight, grad = param.double(), param.grad.double()
            update = torch.sign(slow * average + (1 - slow) * grad)
            average.mul_(slower).add_(grad, alpha=1 - slower)
            rate = self.decay if weight.dim() >= 2 or self.decays_vectors else 0.0
            param.copy_(weight - self.lr * (update + rate * weight))

    def zero_grad(self) -> None:
        """Forget gradients."""
        for param in self.params:
            param.grad = None
