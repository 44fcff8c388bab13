"""Averages of the weights over steps, which an evaluation and an export take in their place.

Exponential moving averages of the trained weights and of the running statistics of batch
normalisations, in fp32. Each is next to its tensor and split like it. They begin as the
weights, and follow quickly at first: by 1 - min(``optim.ema_decay``, (1 + n) / (10 + n)) at
the n-th step, which is what EfficientNet's authors trained with (``num_updates`` of
TensorFlow's ExponentialMovingAverage). A skipped step does not count.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardyard.checkpoint.buffers import ema_name
from shardyard.models.batch_norm import batch_norms_in
from shardyard.parallel.gradients import local_part, placed_like

_STEPS = ema_name("steps")


class WeightEma:
    """Follows a sharded model, shard by shard."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        """Take a model that has its storage; values come later (``begin``, or a load)."""
        followed = {f"model.{n}": p for n, p in model.named_parameters() if p.requires_grad}
        statistics = (
            (f"buffer.{name}.{key}", getattr(norm, key))
            for name, norm in batch_norms_in(model).items()
            for key in ("running_mean", "running_var")
        )
        followed |= {name: held for name, held in statistics if held is not None}
        self._decay = decay
        self._pairs = {
            name: (local_part(each.detach()), torch.zeros_like(local_part(each.detach())))
            for name, each in followed.items()
        }
        device = next((now.device for now, _ in self._pairs.values()), torch.device("cpu"))
        self._steps = torch.zeros((), dtype=torch.float32, device=device)
        self._tensors = {
            ema_name(name): placed_like(followed[name], average)
            for name, (_, average) in self._pairs.items()
        } | {_STEPS: self._steps}

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a checkpoint, sharing storage."""
        return self._tensors

    @torch.no_grad()
    def begin(self) -> None:
        """Be what is followed, as it now is."""
        self._steps.zero_()
        for now, average in self._pairs.values():
            average.copy_(now)

    @torch.no_grad()
    def follow(self, *, skip: Tensor) -> None:
        """Update the averages after a step, on the device; they stay where ``skip`` is true."""
        # fp64 until the difference is taken: 1 - 0.9999 in fp32 has only a few digits left.
        is_taken = (~skip.bool()).double()
        self._steps += is_taken
        decay = ((1.0 + self._steps.double()) / (10.0 + self._steps.double())).clamp(
            max=self._decay
        )
        share = ((1.0 - decay) * is_taken).float()
        for now, average in self._pairs.values():
            average.lerp_(now, share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has its averages meanwhile, and they what it had."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # One tensor at a time: all at once would take the memory of another copy of the model.
        for now, average in self._pairs.values():
            held = now.clone()
            now.copy_(average)
            average.copy_(held)
