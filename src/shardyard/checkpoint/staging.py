"""Copies of this rank's shards in host memory, in buffers that are kept from save to save.

Allocating pinned memory costs more than the copy itself, so it happens at the first save only.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.parallel.device import synchronize_stream


class HostCopy:
    """Holds one copy of this rank's shards; the next copy overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's shards; on return the originals may change.

        Returns:
            Contiguous CPU tensors, valid until the next call.
        """
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        self._buffers = {name: self._buffer(name, shard) for name, shard in shards.items()}
        for name, shard in shards.items():
            self._buffers[name].copy_(shard, non_blocking=True)
        for device in {shard.device for shard in shards.values()}:
            synchronize_stream(device)
        return self._buffers

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == shard.shape and kept.dtype == shard.dtype:
            return kept
        # only pinned memory is copied to without waiting for each tensor
        pin = shard.device.type != "cpu"
        return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=pin)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without its history."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.detach()
