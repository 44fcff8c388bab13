"""Initial factor of fp16's gradients, so that small ones do not underflow to 0.

It multiplies the gradient of each loss, not the loss, which stays what it is. The code that
divides the gradients also divides them by this factor (``train/loss_scaling.py`` moves it).
"""

from typing import Any

import torch
from torch import Tensor


class LossScale:
    """Shared by all that makes losses in one model."""

    factor: Tensor | None = None
    """fp32, on the device, changed in place between steps; None: gradients begin as they are."""

    def on(self, loss: Tensor) -> Tensor:
        """A loss whose gradient begins with the factor."""
        if self.factor is None:
            return loss
        scaled: Tensor = _Begin.apply(loss, self.factor)  # type: ignore[no-untyped-call]
        return scaled


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return loss.clone()  # a stage of a pipeline detaches it in place, as it may no view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None
