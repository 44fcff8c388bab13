"""Norms of whole parameters, from what each rank holds of them, in one all-reduce.

A parameter may be split over dp_shard, cp, tp and ep, copied over dp_replicate, held by one stage
of a pipeline or by two. All ranks fill rows of numbers with a place for each matrix or vector of
the model, so that one sum over the world serves all of them. What a rank has no part of stays 0.

The experts of a block are one parameter (E, ...), and as many matrices: each has a norm of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.models.local_shard import local_shard
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
        # every stage of a pipeline has experts, and as many in each block
        stacks = {name: param for name, param in params.items() if _is_stack(name, param)}
        experts = max((len(param) for param in stacks.values()), default=1)
        sizes = {name: experts if _of_experts(name) else 1 for name in sorted(names)}
        ends = accumulate(sizes.values())
        self._place_of = {name: end - sizes[name] for name, end in zip(sizes, ends, strict=True)}
        self._num_places = sum(sizes.values())
        self._experts_of = {name: _own_experts(param) for name, param in stacks.items()}
        self._holders_of = {
            name: holders(param) * (2 if name in held_twice else 1)
            for name, param in params.items()
        }
        self._known: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def of(self, names: Sequence[str], *kinds: Sequence[Tensor]) -> Tensor:
        """Norms of whole matrices, fp64. All ranks call it, with as many kinds.

        Args:
            names: Of this rank's parameters, any of them, or none.
            kinds: Each a list by ``names``: what lies where this rank's part of the parameter does.

        Returns:
            (kinds, matrices): one for each name, and of experts one for each of which this rank has
            a part. ``by_name`` takes them apart.
        """
        rows = torch.zeros(len(kinds), self._num_places, dtype=torch.float64, device=self._device)
        places, shares = self._on_device(tuple(names))
        for row, parts in zip(rows, kinds, strict=True):
            matrices = [
                matrix
                for name, part in zip(names, parts, strict=True)
                for matrix in (part.unbind() if name in self._experts_of else (part,))
            ]
            if matrices:
                row[places] = square_sums(matrices) / shares
        if dist.is_initialized():
            dist.all_reduce(rows)
        return rows[:, places].sqrt()

    def by_name(self, names: Sequence[str], of_matrices: Tensor) -> list[Tensor]:
        """Numbers of matrices as factors of the parameters: (), of experts (E, 1, 1)."""
        sizes = [len(self._experts_of.get(name, range(1))) for name in names]
        return [
            part.view(-1, 1, 1) if name in self._experts_of else part.view(())
            for name, part in zip(names, torch.split(of_matrices, sizes), strict=True)
        ]

    def _on_device(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Places and numbers of holders, copied there once: a copy waits for the device."""
        if names not in self._known:
            own = {name: self._experts_of.get(name, range(1)) for name in names}
            places = [self._place_of[name] + expert for name in names for expert in own[name]]
            shares = [self._holders_of[name] for name in names for _ in own[name]]
            self._known[names] = (
                torch.tensor(places, dtype=torch.int64, device=self._device),
                torch.tensor(shares, dtype=torch.float64, device=self._device),
            )
        return self._known[names]


def _of_experts(name: str) -> bool:
    return "experts" in name.split(".")


def _is_stack(name: str, param: Tensor) -> bool:
    """Whether a parameter holds one matrix of each expert."""
    return _of_experts(name) and param.dim() == 3


def _own_experts(param: Tensor) -> range:
    """Experts of which this rank has a part."""
    own = local_shard(param).slices[0]
    return range(own.start, own.stop)
