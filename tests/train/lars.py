"""LARS by hand, of whole tensors, to hold the sharded one to.

You, Gitman, Ginsburg 2017, arXiv:1708.03888, algorithm 1; norms and biases have neither decay nor a
rate of their own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Lars:
    """Plain torch in fp32."""

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, decay: float, momentum: float, trust: float
    ) -> None:
        self.params = list(params)
        self.lr, self.decay, self.momentum, self.trust = lr, decay, momentum, trust
        self.v = [torch.zeros_like(w) for w in self.params]

    @torch.no_grad()
    def step(self) -> None:
        """One update from ``.grad``."""
        for w, v in zip(self.params, self.v, strict=True):
            g = w.grad
            assert g is not None
            local_rate = 1.0
            if w.dim() >= 2:
                of_w, of_g = float(w.double().norm()), float(g.double().norm())
                if of_w > 0 and of_g > 0:
                    local_rate = self.trust * of_w / (of_g + self.decay * of_w)
                g = g + self.decay * w
            v.copy_(self.momentum * v + self.lr * local_rate * g)
            w -= v

    def zero_grad(self) -> None:
        """As of torch's optimizers."""
        for w in self.params:
            w.grad = None
