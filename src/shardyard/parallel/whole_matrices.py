"""Whole matrices for an optimizer that needs them, of parameters that ranks split.

The ranks that split a matrix take turns: each gets whole one of as many matrices, computes with it,
and sends every rank its part of the result. So a step of all matrices moves each element twice, and
no two ranks of a group compute the same.

Ranks send to each other directly, so that any split works, over one axis or over several: FSDP's
uneven rows, the columns of tp. Experts that are split only by number stay where they are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import getitem

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardyard.models.local_shard import compute_shard_bounds
from shardyard.torch_private import mesh_ranks

Compute = Callable[[Tensor], Tensor]
"""From matrices (..., rows, columns) to as many results of the same shape."""


@dataclass(frozen=True)
class _Part:
    """Part of a matrix that one rank holds."""

    rank: int
    """Its number in the world."""
    slices: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.slices)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Split:
    """A matrix that several ranks split."""

    whole_shape: tuple[int, ...]
    parts: tuple[_Part, ...]
    """Parts of all ranks that split it, in the same order on each."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(part.rank for part in self.parts)


class WholeMatrices:
    """Computes with whole matrices of this rank's parameters."""

    def __init__(self, params: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
        """Args:
        params: Name -> parameter as it is split; all are matrices, or stacks of them.
        dtype: Format in which parts are sent and computed with.
        """
        self._splits = {name: _split_of(param) for name, param in params.items()}
        self._dtype = dtype
        self._device = next((each.device for each in params.values()), torch.device("cpu"))

    def apply(
        self, names: Sequence[str], parts: Mapping[str, Tensor], compute: Compute
    ) -> Iterator[tuple[str, Tensor]]:
        """Compute with each matrix, whole, and yield this rank's part of the result.

        All ranks that split one of these matrices call it, with the same names in the same order.

        Args:
            parts: Name -> what this rank holds of the matrix.
        """
        for group in self._turns(names):
            split = self._splits[group[0]]
            if split is None:
                for name in group:
                    whole = parts[name].to(self._dtype)
                    yield name, compute(whole) if whole.numel() else whole
                continue
            owners = dict(zip(group, split.ranks, strict=False))
            wholes = self._gather(group, owners, parts)
            results = {name: compute(whole) for name, whole in wholes.items()}
            del wholes
            yield from self._scatter(group, owners, results).items()

    def _turns(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Matrices that are exchanged at the same time: one for each rank of those that split them.

        A matrix that is whole on this rank is a turn by itself.
        """
        turn: list[str] = []
        for name in names:
            split = self._splits[name]
            ranks = None if split is None else split.ranks
            if turn and (ranks is None or ranks != self._ranks(turn[0]) or len(turn) == len(ranks)):
                yield turn
                turn = []
            turn.append(name)
            if ranks is None:
                yield turn
                turn = []
        if turn:
            yield turn

    def _ranks(self, name: str) -> tuple[int, ...] | None:
        split = self._splits[name]
        return None if split is None else split.ranks

    def _gather(
        self, group: Sequence[str], owners: Mapping[str, int], parts: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the matrices of which this rank is the owner, whole."""
        me, operations = dist.get_rank(), []
        wholes: dict[str, Tensor] = {}
        received: list[tuple[Tensor, Tensor]] = []
        for name in group:
            split = self._splits[name]
            assert split is not None
            part = parts[name].to(self._dtype).contiguous()
            if owners[name] != me:
                if part.numel():
                    operations.append(dist.P2POp(dist.isend, part, owners[name]))
                continue
            whole = torch.empty(split.whole_shape, dtype=self._dtype, device=self._device)
            wholes[name] = whole
            for other in split.parts:
                if other.rank == me:
                    whole[other.slices] = part
                elif other.elements:
                    buffer = torch.empty(other.shape, dtype=self._dtype, device=self._device)
                    operations.append(dist.P2POp(dist.irecv, buffer, other.rank))
                    received.append((whole[other.slices], buffer))
        _exchange(operations)
        for target, buffer in received:
            target.copy_(buffer)
        return wholes

    def _scatter(
        self, group: Sequence[str], owners: Mapping[str, int], results: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return this rank's part of each result."""
        me, operations = dist.get_rank(), []
        local_results: dict[str, Tensor] = {}
        for name in group:
            split = self._splits[name]
            assert split is not None
            mine = next(part for part in split.parts if part.rank == me)
            if owners[name] == me:
                local_results[name] = results[name][mine.slices]
                for other in split.parts:
                    if other.rank != me and other.elements:
                        part = results[name][other.slices].contiguous()
                        operations.append(dist.P2POp(dist.isend, part, other.rank))
                continue
            local_results[name] = torch.empty(mine.shape, dtype=self._dtype, device=self._device)
            if mine.elements:
                operations.append(dist.P2POp(dist.irecv, local_results[name], owners[name]))
        _exchange(operations)
        return local_results


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()


def _split_of(param: Tensor) -> _Split | None:
    """Return who holds what of a matrix; None: this rank's part is of whole matrices."""
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, param.placements
    axes = [
        axis
        for axis, placement in enumerate(placements)
        if mesh.size(axis) > 1 and not placement.is_replicate()
    ]
    is_stack = param.dim() == 3
    if not axes or (is_stack and all(_split_dim(placements[axis]) == 0 for axis in axes)):
        return None
    mine = mesh.get_coordinate()
    assert mine is not None
    parts, ranks = [], mesh_ranks(mesh)
    for axis_ranks in product(*(range(mesh.size(axis)) for axis in axes)):
        coordinate = list(mine)
        for axis, axis_rank in zip(axes, axis_ranks, strict=True):
            coordinate[axis] = axis_rank
        offsets, sizes = compute_shard_bounds(param.shape, mesh, placements, coordinate)
        slices = tuple(
            slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)
        )
        rank = reduce(getitem, coordinate, ranks)
        parts.append(_Part(rank=rank, slices=slices))
    return _Split(whole_shape=tuple(param.shape), parts=tuple(parts))


def _split_dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]
