"""Host memory for the shards of a rank, in few large pieces instead of one for each tensor.

torch's allocator of pinned memory rounds each request up to a power of two: 75 GiB of states, a
tensor at a time, may take 150 GiB of a host that has 128. Packed into pieces of a power of two the
same states take what they need, and each piece is pinned once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

CHUNK_BYTES = 2**31
"""Of a piece; a larger tensor gets a piece of the next power of two, which others then fill up."""
_ALIGN = 64
"""Bytes of a cache line; every dtype may begin there."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    chunk: int
    begin: int
    """Bytes into the piece."""


def packed(
    sizes: Mapping[str, int], *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[dict[str, Place], list[int]]:
    """Places of tensors, and the bytes that each piece needs: largest first, where it first fits.

    Args:
        sizes: Name of a tensor -> its bytes.
    """
    places: dict[str, Place] = {}
    room: list[int] = []
    used: list[int] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        size = -(-sizes[name] // _ALIGN) * _ALIGN
        index = next((i for i, free in enumerate(room) if free - used[i] >= size), len(room))
        if index == len(room):
            room.append(max(chunk_bytes, 1 << max(0, size - 1).bit_length()))
            used.append(0)
        places[name] = Place(index, used[index])
        used[index] += size
    return places, used


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
