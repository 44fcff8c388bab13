"""The part of a parameter that this rank holds, and where it lies in the whole."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class LocalShard:
    """A block of a whole tensor that begins at ``offsets``."""

    tensor: Tensor
    offsets: tuple[int, ...]
    whole_shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this block in the whole tensor."""
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.offsets, self.tensor.shape, strict=True)
        )

    def linear_index(self) -> Tensor:
        """Row-major index in the whole tensor of each element of this block (int64)."""
        device = self.tensor.device
        index = torch.zeros((), dtype=torch.int64, device=device)
        stride = math.prod(self.whole_shape)
        for dim, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            stride //= max(self.whole_shape[dim], 1)
            along = torch.arange(offset, offset + size, device=device) * stride
            index = index + along.reshape([-1] + [1] * (self.tensor.dim() - dim - 1))
        return index


def local_shard(param: Tensor) -> LocalShard:
    """This rank's part of a parameter, sharing its storage."""
    data = param.detach()
    if not isinstance(data, DTensor):
        return LocalShard(data, (0,) * data.dim(), tuple(data.shape))
    # torch 2.13 has no public function for this; DCP uses the same one to plan its writes
    _, offsets = compute_local_shape_and_global_offset(
        data.shape, data.device_mesh, data.placements
    )
    return LocalShard(data.to_local(), tuple(offsets), tuple(data.shape))
