"""Schedule-free AdamW by hand, from the paper: the reference of its tests."""

from collections.abc import Iterable

import torch
from torch import Tensor


class ScheduleFree:
    """Defazio et al. 2024, arXiv:2405.15682, algorithm 1, in fp64.

    Its three sequences are kept apart here. The authors' package keeps y and z only.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        warmup: int = 0,
        decays_vectors: bool = False,
    ) -> None:
        self.params = list(params)
        self.lr, self.decay, self.betas, self.eps = lr, decay, betas, eps
        self.warmup, self.decays_vectors = warmup, decays_vectors
        self.z = [param.detach().double().clone() for param in self.params]
        self.x = [each.clone() for each in self.z]
        self.squares = [torch.zeros_like(each) for each in self.z]
        self.steps, self.weight_sum, self.lr_max = 0, 0.0, 0.0

    @torch.no_grad()
    def step(self) -> None:
        """One update from ``.grad``, which is of y: the parameters."""
        self.steps += 1
        lr = self.lr * min(1.0, self.steps / self.warmup) if self.warmup else self.lr
        self.lr_max = max(self.lr_max, lr)
        self.weight_sum += self.lr_max**2
        share = self.lr_max**2 / self.weight_sum
        first, second = self.betas
        for param, x, z, square in zip(self.params, self.x, self.z, self.squares, strict=True):
            assert param.grad is not None
            grad, y = param.grad.double(), (1 - first) * z + first * x
            square.mul_(second).addcmul_(grad, grad, value=1 - second)
            direction = grad / ((square / (1 - second**self.steps)).sqrt() + self.eps)
            if param.dim() >= 2 or self.decays_vectors:
                direction += self.decay * y
            z.sub_(lr * direction)
            x.mul_(1 - share).add_(z, alpha=share)
            param.copy_((1 - first) * z + first * x)

    def zero_grad(self) -> None:
        """Forget gradients."""
        for param in self.params:
            param.grad = None
