"""Adafactor by hand, from the paper: the reference of its tests."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Adafactor:
    """Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5, in fp64.

    The learning rate is given, and not relative to the size of a parameter.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        decays_vectors: bool = False,
    ) -> None:
        self.params = dict(params)
        self.lr, self.decay, self.decays_vectors = lr, decay, decays_vectors
        self.estimates: dict[str, tuple[Tensor, ...]] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """One update from ``.grad``."""
        self.steps += 1
        beta = 1 - self.steps**-0.8
        for name, param in self.params.items():
            assert param.grad is not None
            weight, grad = param.double(), param.grad.double()
            squares = grad.square() + 1e-30
            new: tuple[Tensor, ...] = (squares,)
            if param.dim() >= 2:  # of a stack of experts each is a matrix
                new = (squares.sum(dim=-1), squares.sum(dim=-2))
            old = self.estimates.get(name, tuple(map(torch.zeros_like, new)))
            held = tuple(beta * a + (1 - beta) * b for a, b in zip(old, new, strict=True))
            self.estimates[name] = held
            if param.dim() >= 2:
                rows, columns = held[0], held[1]
                outer = rows.unsqueeze(-1) * columns.unsqueeze(-2)
                estimate = outer / rows.sum(dim=-1)[..., None, None]
                over: tuple[int, ...] = (-2, -1)
            else:
                estimate, over = held[0], (0,)
            update = grad / estimate.sqrt()
            rms = update.square().mean(dim=over, keepdim=True).sqrt()
            update = update / rms.clamp(min=1.0)
            decay = self.decay if param.dim() >= 2 or self.decays_vectors else 0.0
            param.copy_(weight - self.lr * (update + decay * weight))

    def zero_grad(self) -> None:
        """Forget gradients."""
        for param in self.params.values():
            param.grad = None
