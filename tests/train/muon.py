"""Muon by hand, from its author's page: the reference of its tests."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Muon:
    """kellerjordan.github.io/posts/muon with the step size of arXiv:2502.16982, in fp64.

    Other parameters than the matrices of blocks move by AdamW.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self.lr, self.decay, self.momentum = lr, decay, momentum
        self.matrices = [
            param
            for name, param in params.items()
            if param.dim() == 2 and any(part.isdigit() for part in name.split("."))
        ]
        of_matrices = {id(each) for each in self.matrices}
        others = [param for param in params.values() if id(param) not in of_matrices]
        self.averages = [torch.zeros_like(each, dtype=torch.float64) for each in self.matrices]
        self.adamw = torch.optim.AdamW(
            [
                {"params": [each for each in others if each.dim() >= 2], "weight_decay": decay},
                {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=betas,
            eps=eps,
        )

    @torch.no_grad()
    def step(self) -> None:
        """One update from ``.grad``."""
        for param, average in zip(self.matrices, self.averages, strict=True):
            assert param.grad is not None
            weight, grad = param.double(), param.grad.double()
            average.mul_(self.momentum).add_(grad, alpha=1 - self.momentum)
            direction = _newton_schulz(grad * (1 - self.momentum) + average * self.momentum)
            size = 0.2 * max(weight.shape) ** 0.5
            param.copy_(weight - self.lr * (size * direction + self.decay * weight))
        self.adamw.step()

    def zero_grad(self) -> None:
        """Forget gradients."""
        for param in self.matrices:
            param.grad = None
        self.adamw.zero_grad()


def _newton_schulz(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    wide = matrix.T if rows > columns else matrix
    wide = wide / max(float(torch.sqrt((wide**2).sum())), 1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide - 4.7750 * gram @ wide + 2.0315 * gram @ gram @ wide
    return wide.T if rows > columns else wide
