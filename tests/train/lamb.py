"""LAMB by hand, of whole tensors, to hold the sharded one to.

You et al. 2019, arXiv:1904.00962, algorithm 2, with phi the identity; norms and biases have neither
decay nor a trust ratio.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Lamb:
    """Plain torch in fp32."""

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.params = list(params)
        self.lr, self.decay, self.betas, self.eps = lr, decay, betas, eps
        self.m = [torch.zeros_like(x) for x in self.params]
        self.v = [torch.zeros_like(x) for x in self.params]
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        """One update from ``.grad``."""
        self.t += 1
        b1, b2 = self.betas
        for x, m, v in zip(self.params, self.m, self.v, strict=True):
            g = x.grad
            assert g is not None
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g**2)
            r = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
            ratio = 1.0
            if x.dim() >= 2:
                r = r + self.decay * x
                of_x, of_r = float(x.double().norm()), float(r.double().norm())
                ratio = of_x / of_r if of_x > 0 and of_r > 0 else 1.0
            x -= self.lr * ratio * r

    def zero_grad(self) -> None:
        """As of torch's optimizers."""
        for x in self.params:
            x.grad = None
