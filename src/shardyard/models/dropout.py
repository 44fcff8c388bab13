"""Dropout whose mask depends on (seed, sample, place in the model, element) and nothing else.

So the same sample is masked alike whatever rank, micro-batch or recomputation it passes through.

Shape suffixes: B = samples of a micro-batch, L = tokens of a sample, D = width of the model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardyard.models.counter_random import keep_mask, place_key, random_bits


class SampleKeys:
    """Tells the dropout places and routers of one model what is passing through."""

    samples_B: Tensor | None = None
    """Stream position of each sample, int64; set at the beginning of each forward pass."""
    lengths_B: Tensor | None = None
    """Tokens of each sample, padding follows them; set with ``samples_B``. None: all are full."""
    computed_l: Tensor | None = None
    """Indices in a sample of the tokens that this rank computes; None: all."""
    tokens_l: Tensor | None = None
    """Of these, those whose residual stream it holds between matrices; None: all."""


class Dropout:
    """A forward hook that masks the output of one module while it trains."""

    def __init__(
        self,
        place: str,
        *,
        drop: float,
        seed: int,
        keys: SampleKeys,
        part: tuple[int, int] | None = None,
    ) -> None:
        """Args:
        part: Where ranks of tp split the width: this rank's first column, and how many there are
            over all; all tokens that it computes pass through then. None: it has the whole width.
        """
        self._drop = drop
        self._place_key = place_key(seed, place)
        self._keys = keys
        self._part = part

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if not module.training:
            return None
        if isinstance(output, tuple):
            return (self.mask(output[0]), *output[1:])
        return self.mask(output)

    def mask(self, x_BLD: Tensor) -> Tensor:
        """What is left of ``x_BLD``, scaled so that its mean stays."""
        assert self._keys.samples_B is not None
        length, columns = x_BLD.shape[1:]
        first, width = self._part or (0, columns)
        key_B11 = random_bits(self._place_key, self._keys.samples_B)[:, None, None]
        tokens_L = self._keys.tokens_l if self._part is None else self._keys.computed_l
        if tokens_L is None:
            tokens_L = torch.arange(length, device=x_BLD.device)
        columns_D = torch.arange(first, first + columns, device=x_BLD.device)
        element_LD = tokens_L[:, None] * width + columns_D
        keep_BLD = keep_mask(key_B11, element_LD, drop=self._drop)
        return x_BLD * keep_BLD * (1.0 / (1.0 - self._drop))


def add_dropout(places: dict[str, nn.Module], *, drop: float, seed: int, keys: SampleKeys) -> None:
    """Mask the outputs of named modules. Call before sharding: its hooks must come after these."""
    for place, module in places.items():
        module.register_forward_hook(Dropout(place, drop=drop, seed=seed, keys=keys))
