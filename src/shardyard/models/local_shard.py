"""The part of a parameter that this rank holds, and where it lies in the whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardyard.torch_private import is_strided


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


def parameter_of(part: Tensor, whole: Tensor) -> nn.Parameter:
    """Return a parameter for a part of another; a frozen one stays frozen."""
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def local_shard(param: Tensor) -> LocalShard:
    """This rank's part of a parameter, sharing its storage."""
    data = param.detach()
    if not isinstance(data, DTensor):
        return LocalShard(data, (0,) * data.dim(), tuple(data.shape))
    local, (offsets, sizes) = data.to_local(), shard_bounds(data)
    assert tuple(local.shape) == sizes, (local.shape, sizes, data.placements)
    return LocalShard(local, offsets, tuple(data.shape))


def shard_bounds(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's part in the whole."""
    return compute_shard_bounds(tensor.shape, tensor.device_mesh, tensor.placements)


def compute_shard_bounds(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a rank's part of a whole of that shape.

    Args:
        coordinate: Of the rank in the mesh; None: this rank.

    torch 2.13 has it wrong where two axes split one dimension and neither divides it: of 513 rows
    over 2 x 4 ranks its parts overlap.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    axes = enumerate(placements)
    # a strided axis (FSDP's) splits what the axes after it (tp, ep) have left
    for axis, placement in sorted(axes, key=lambda each: is_strided(each[1])):
        if not (isinstance(placement, Shard) or is_strided(placement)):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        part = -(-sizes[dim] // mesh.size(axis))
        at = mesh.get_local_rank(axis) if coordinate is None else coordinate[axis]
        begin = min(part * at, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(part, sizes[dim] - begin)
    return tuple(offsets), tuple(sizes)
