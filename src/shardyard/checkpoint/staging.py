"""Copies of this rank's shards in host memory, in buffers that are kept from save to save.

Allocating pinned memory costs more than the copy itself, so it happens at the first save only, and
in pieces that waste none of it (``staging.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.parallel.device import synchronize_stream

# Few large pieces hold the shards of a rank, instead of one allocation for each tensor.
#
# torch's allocator of pinned memory rounds each request up to a power of two. 75 GiB of states, a
# tensor at a time, may so take 150 GiB of a host that has 128. Packed into pieces of a power of two
# the same states take what they need, and each piece is pinned once.

CHUNK_BYTES = 2**31
"""Bytes of a piece; a larger tensor gets the next power of two, which others then fill up."""
_ALIGN = 64
"""Bytes of a cache line; every dtype may begin there."""


@dataclass(frozen=True)
class ChunkLocation:
    """Position of a tensor."""

    chunk: int
    begin: int
    """Bytes into the piece."""


def packed(
    sizes: Mapping[str, int], *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[dict[str, ChunkLocation], list[int]]:
    """Places of tensors, and the bytes that each piece needs: largest first, where it first fits.

    Args:
        sizes: Name of a tensor -> its bytes.
    """
    locations: dict[str, ChunkLocation] = {}
    capacities: list[int] = []
    used: list[int] = []
    # Largest first: small tensors then fill what the large ones leave of a piece.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        size = -(-sizes[name] // _ALIGN) * _ALIGN
        index = next(
            (i for i, free in enumerate(capacities) if free - used[i] >= size), len(capacities)
        )
        if index == len(capacities):
            capacities.append(max(chunk_bytes, 1 << max(0, size - 1).bit_length()))
            used.append(0)
        locations[name] = ChunkLocation(index, used[index])
        used[index] += size
    # The bytes in use, not the capacities: a small model must not pin a whole piece.
    return locations, used


def host_buffers(
    shards: Mapping[str, Tensor], *, pin: bool, chunk_bytes: int = CHUNK_BYTES
) -> dict[str, Tensor]:
    """Memory of the shape and format of each shard.

    Args:
        pin: Whether a device copies to it without the processor.
    """
    sizes = {name: shard.numel() * shard.element_size() for name, shard in shards.items()}
    places, used = packed(sizes, chunk_bytes=chunk_bytes)
    chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in used]
    return {
        name: _at(chunks[place.chunk], place.begin, shards[name]) for name, place in places.items()
    }


def _at(chunk: Tensor, begin: int, like: Tensor) -> Tensor:
    size = prod(like.shape) * like.element_size()
    return chunk[begin : begin + size].view(like.dtype).view(like.shape)


class HostCopy:
    """Holds one copy of this rank's shards; the next copy overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take_for_save(
        self,
        step: int,  # noqa: ARG002
        tensors: dict[str, Tensor],
        values_json: str,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Copy this rank's shards; on return the originals may change.

        Returns:
            Contiguous CPU tensors, valid until the next call.
        """
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        if _forms(self._buffers) != _forms(shards):
            self._buffers = {}  # first: both at once may be more than the host has
            # only pinned memory is copied to without waiting for each tensor
            pin = any(shard.device.type != "cpu" for shard in shards.values())
            self._buffers = host_buffers(shards, pin=pin)
        copy_shards(tensors, self._buffers)
        return self._buffers


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def copy_shards(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards into host memory; on return the originals may change."""
    shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
    for name, shard in shards.items():
        # All copies are queued before the one wait below: a wait for each would idle the link.
        buffers[name].copy_(shard, non_blocking=True)
    for device in {shard.device for shard in shards.values()}:
        synchronize_stream(device)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without its history."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.detach()
