"""Norms of whole parameters, from what each rank holds of them, in one all-reduce.

A parameter may be split over dp_shard, cp, tp and ep, copied over dp_replicate, held by one stage
of a pipeline or by two. All ranks fill rows of numbers with a place for each parameter of the
model, so that one sum over the world serves all of them. What a rank has no part of stays 0.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.parallel.gradients import holders, square_sums


class WholeNorms:
    """Knows who else holds what this rank holds."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        names: Collection[str] | None = None,
        held_twice: Collection[str] = (),
    ) -> None:
        """Args:
        params: What this rank has, as it is split.
        names: Parameters of all stages of a pipeline, the same on every rank; None: these alone.
        held_twice: Names of parameters that two pipeline stages hold, equal on both.
        """
        names = params if names is None else names
        self._device = next((param.device for param in params.values()), torch.device("cpu"))
        self._place_of = {name: place for place, name in enumerate(sorted(names))}
        self._holders_of = {
            name: holders(param) * (2 if name in held_twice else 1)
            for name, param in params.items()
        }
        self._known: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def of(self, names: Sequence[str], *kinds: Sequence[Tensor]) -> Tensor:
        """Norms of whole parameters (kinds, names), fp64. All ranks call it, with as many kinds.

        Args:
            names: Of this rank's parameters, any of them, or none.
            kinds: Each a list by ``names``: what lies where this rank's part of the parameter does.
        """
        rows = torch.zeros(
            len(kinds), len(self._place_of), dtype=torch.float64, device=self._device
        )
        places, shares = self._on_device(tuple(names))
        for row, parts in zip(rows, kinds, strict=True):
            if names:
                row[places] = square_sums(parts) / shares
        if dist.is_initialized():
            dist.all_reduce(rows)
        return rows[:, places].sqrt()

    def _on_device(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Places and numbers of holders, copied there once: a copy waits for the device."""
        if names not in self._known:
            places = [self._place_of[name] for name in names]
            shares = [self._holders_of[name] for name in names]
            self._known[names] = (
                torch.tensor(places, dtype=torch.int64, device=self._device),
                torch.tensor(shares, dtype=torch.float64, device=self._device),
            )
        return self._known[names]
