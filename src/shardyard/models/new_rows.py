"""Rows of the embedding and the head for tokens that the weights' files have no row for.

The mean of a matrix is summed in a fixed order from the file, so each layout begins with the same
bits. Only ranks that hold new rows read for it.

Shape suffixes: R = rows of the file, D = width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardyard.families.family import Family
from shardyard.families.file_tensors import head_of, table_of
from shardyard.models.local_shard import LocalShard

_ELEMENTS = 2**22
"""Elements of a file that are summed at a time: 32 MiB in fp64."""

FillDrawn = Callable[[str, LocalShard], None]
"""Fills a part of the named parameter with its random initial values."""


@dataclass(frozen=True)
class NewRows:
    """Initial values of the rows beyond those of the files."""

    method: Literal["mean", "random"]
    draw: FillDrawn

    def fill(self, parameter: str, part: LocalShard, source: Any) -> None:
        """Fill rows of a parameter that its tensor in a file lacks.

        Args:
            part: Only new rows, with their place in the whole parameter.
            source: The tensor in the file, of which any rows can be read.
        """
        if not part.tensor.numel():
            return
        if part.tensor.dim() == 1:
            part.tensor.zero_()  # the bias of a tied head, as transformers extends it
        elif self.method == "random":
            self.draw(parameter, part)
        else:
            part.tensor.copy_(_mean(source)[part.slices[1:]].expand_as(part.tensor))


def _mean(source: Any) -> Tensor:
    """Return the mean of all rows of a file's tensor, of shape (D)."""
    rows, width = source.get_shape()
    at_once = max(1, _ELEMENTS // width)
    total_D: Tensor = torch.zeros(width, dtype=torch.float64)
    for start in range(0, rows, at_once):
        rows_RD = source[start : min(rows, start + at_once)].to(torch.float64)
        total_D += rows_RD.sum(dim=0)
    mean_D: Tensor = (total_D / rows).to(torch.float32)
    return mean_D


def rows_by_token(family: Family) -> tuple[str, ...]:
    """Return the names in files of the tensors that may have a row for each token."""
    bias = f"{family.head.module}.bias"
    return table_of(family), head_of(family), family.tied_names.get(bias, bias)


def split_new_rows(shard: LocalShard, rows: int) -> tuple[LocalShard, LocalShard]:
    """Return this rank's part of the first ``rows`` rows of a parameter, and of the others."""
    first, *offsets = shard.offsets
    old = min(max(0, rows - first), shard.tensor.shape[0])
    return (
        LocalShard(shard.tensor[:old], shard.offsets, (rows, *shard.whole_shape[1:])),
        LocalShard(shard.tensor[old:], (first + old, *offsets), shard.whole_shape),
    )
