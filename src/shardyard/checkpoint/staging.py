"""Copies of this rank's shards in host memory, in buffers that are kept from save to save.

Allocating pinned memory costs more than the copy itself, so it happens at the first save only, and
in pieces that waste none of it (``host_chunks.py``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.checkpoint.host_chunks import host_buffers
from shardyard.parallel.device import synchronize_stream


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
        buffers[name].copy_(shard, non_blocking=True)
    for device in {shard.device for shard in shards.values()}:
        synchronize_stream(device)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without its history."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.detach()
