"""Dynamic loss scale of fp16, as in torch.amp.GradScaler, without waiting for the device.

fp16 ends at 65,504 and has few bits below 6e-5, so gradients are computed a factor larger.
A step whose gradients overflow is skipped and halves the scale; after enough steps without
one it doubles (torch/amp/grad_scaler.py of torch 2.13; Micikevicius et al. 2018,
arXiv:1710.03740, section 3.2). The factor is the scale divided by the losses of a full
micro-batch. So the scale means the same as where a loss is a mean, and 2**16 is as good a
start. Ranks decide by the same totals, so all have the same scale.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shardyard.config.schema.recipe import Recipe
from shardyard.models.grad_scale import LossScale

FIRST = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps in a row without an overflow after which the scale doubles."""
LEAST = 1.0
"""Smaller ones are none: what overflows with it are not gradients made large (as DeepSpeed's
min_loss_scale and Megatron-LM's min-loss-scale)."""


_LARGEST = 2.0**127
"""Power of two in fp32."""


class LossScaling:
    """The scale of a run in fp16, on the device."""

    def __init__(self, *, fixed: float | None, losses: int, device: torch.device) -> None:
        """Args:
        fixed: A scale that never moves; None: one that does.
        losses: Of a full micro-batch.
        """
        self.moves = fixed is None
        # a power of two: dividing by it rounds nothing
        self._losses = 2.0 ** math.ceil(math.log2(losses))
        first = FIRST if fixed is None else fixed
        self.scale = torch.full((), first, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.float32, device=device)
        self.factor = self.scale / self._losses
        """Factor with which gradients begin."""

    @staticmethod
    def of(recipe: Recipe, *, device: torch.device) -> "LossScaling | None":
        """Return the loss scaling of a resolved recipe; None: it does not compute in fp16."""
        if recipe.precision.compute != "fp16":
            return None
        asked = recipe.precision.loss_scale
        losses = int(recipe.optim.micro_batch) * int(recipe.data.seq_len)
        return LossScaling(
            fixed=None if asked == "dynamic" else asked, losses=losses, device=device
        )

    def hand_to(self, losses: LossScale) -> None:
        """Let a model's losses begin their gradients with the factor."""
        losses.factor = self.factor

    def update(self, *, overflowed: Tensor) -> None:
        """After a step. ``overflowed``: whether a gradient was not finite."""
        if not self.moves:
            return
        good = (self.good_steps + 1.0).masked_fill(overflowed, 0.0)
        grows = good >= GROWTH_INTERVAL
        doubled = (2.0 * self.scale).clamp(max=_LARGEST)
        kept = torch.where(grows, doubled, self.scale)
        self.scale.copy_(torch.where(overflowed, 0.5 * self.scale, kept))
        self.good_steps.copy_(good.masked_fill(grows, 0.0))
        # In place, as the model's losses hold this very tensor (hand_to).
        self.factor.copy_(self.scale / self._losses)

    def values(self) -> dict[str, float]:
        """Return the values for a checkpoint; waits for the device."""
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def load(self, values: dict[str, Any]) -> None:
        """Continue from a checkpoint's values; a fixed scale stays."""
        if self.moves:
            self.scale.fill_(values["scale"])
            self.good_steps.fill_(values["good_steps"])
            self.factor.copy_(self.scale / self._losses)
