"""Squares of matrices that ranks split, summed over whole rows and over whole columns.

A rank adds up its own part. Ranks that hold other columns of its rows have the rest of a row's sum,
and ranks that hold other rows that of a column's: one all-reduce over each axis that splits a
matrix carries the sums of all matrices. Of a matrix of R rows and C columns R + C numbers are sent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.models.local_shard import local_shard


class SquareSums(NamedTuple):
    """Sums of squares over whole rows and columns, of those that this rank has a part of, fp64."""

    rows: Tensor
    """(..., rows)."""
    columns: Tensor
    """(..., columns)."""


@dataclass(frozen=True)
class _Split:
    """Axes of a mesh that split a matrix."""

    rows: tuple[dist.ProcessGroup, ...]
    """Groups of ranks with other rows of the same columns."""
    columns: tuple[dist.ProcessGroup, ...]


class MatrixSquares:
    """Sums squares of matrices, or of stacks of them, of this rank's parameters."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """Args:
        params: Name -> parameter as it is split.
        """
        self._splits = {name: _split_of(param) for name, param in params.items()}
        self._local_shapes = {name: local_shard(each).tensor.shape for name, each in params.items()}
        self._device = next((each.device for each in params.values()), torch.device("cpu"))
        groups = [g for each in self._splits.values() for g in (*each.rows, *each.columns)]
        # in this order on every rank of a group: all of them hold parts of the same matrices
        self._groups = list(dict.fromkeys(groups))

    def of(self, parts: Mapping[str, Tensor]) -> dict[str, SquareSums]:
        """Return the sums of each matrix. All ranks that split one of them call it.

        Args:
            parts: Name -> what lies where this rank's part of the matrix does; a matrix that is not
                among them counts as zeros.
        """
        sums = {name: self._own(name, parts.get(name)) for name in self._splits}
        for group in self._groups:
            sent = [
                vector
                for name, split in self._splits.items()
                # ranks with other columns have the rest of a row's sum
                for vector, over in zip(sums[name], (split.columns, split.rows), strict=True)
                if group in over
            ]
            together = torch.cat([each.reshape(-1) for each in sent])
            dist.all_reduce(together, group=group)
            wholes = torch.split(together, [each.numel() for each in sent])
            for vector, whole in zip(sent, wholes, strict=True):
                vector.copy_(whole.view_as(vector))
        return sums

    def holders_of_rows(self, name: str) -> int:
        """Count the ranks that hold parts of the same rows, and so have the same sums of rows."""
        return math.prod(group.size() for group in self._splits[name].columns)

    def _own(self, name: str, part: Tensor | None) -> SquareSums:
        if part is None:
            *stack, rows, columns = self._local_shapes[name]
            return SquareSums(
                *(
                    torch.zeros((*stack, number), dtype=torch.float64, device=self._device)
                    for number in (rows, columns)
                )
            )
        squares = part.square()
        return SquareSums(
            squares.sum(dim=-1, dtype=torch.float64), squares.sum(dim=-2, dtype=torch.float64)
        )


def _split_of(param: Tensor) -> _Split:
    if not isinstance(param, DTensor):
        return _Split((), ())
    mesh, groups = param.device_mesh, dict[int, list[dist.ProcessGroup]]()
    for axis, placement in enumerate(param.placements):
        if mesh.size(axis) > 1 and not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            groups.setdefault(dim, []).append(mesh.get_group(axis))
    dims = param.dim()
    return _Split(tuple(groups.get(dims - 2, ())), tuple(groups.get(dims - 1, ())))
