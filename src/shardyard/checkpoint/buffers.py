"""Buffers of a module in its checkpoint: BatchNorm's running statistics, counts, tables.

Sharding leaves them alone: every rank holds all of each, and one rank writes it. So they must be
equal, or the ranks that did not write would go on with another state after a load.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.errors import CheckpointError
from shardyard.torch_private import names_not_saved

_PREFIX = "buffer."


def is_buffer(name: str) -> bool:
    """Whether a tensor of a checkpoint is a buffer, by its name there."""
    return name.startswith(_PREFIX)


def buffer_name(name: str) -> str:
    """The module's own name of a buffer, from its name in a checkpoint."""
    return name.removeprefix(_PREFIX)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """``buffer.<name>`` of what the module would keep in its ``state_dict``.

    Buffers that are not persistent are left out: the module makes them itself (rotary tables).
    """
    derived = {
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name in names_not_saved(module)
    }
    return {
        f"{_PREFIX}{name}": buffer for name, buffer in model.named_buffers() if name not in derived
    }


def digests(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """A short text for each buffer in host memory; equal if the buffers are."""
    return {name: _digest(buffer) for name, buffer in buffers.items()}


def refuse_differing(digests_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Compare what ``digests`` said on each rank; a rank may lack a buffer of another stage.

    Raises:
        CheckpointError: Two ranks hold the same buffer with other values.
    """
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, tuple[int, int]] = {}
    for rank, of_rank in enumerate(digests_by_rank):
        for name, digest in of_rank.items():
            holder, wanted = first.setdefault(name, (rank, digest))
            if digest != wanted:
                found.setdefault(name, (holder, rank))
    if not found:
        return
    name, (one, other) = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise CheckpointError(
        f"buffer {name.removeprefix(_PREFIX)}{more} of rank {one} is not that of rank {other}. A "
        "checkpoint holds each buffer once, so after a load all ranks would go on with that of "
        "one. What a module counts of its batches differs as the ranks read other samples: only "
        "torch's batch normalisation is counted over all of them. Make it equal before the save "
        "(all_reduce), use one process, or keep it out of the buffers."
    )


def _digest(buffer: Tensor) -> str:
    content = buffer.contiguous().flatten().view(torch.uint8).numpy().data
    checksum = hashlib.sha256(f"{buffer.dtype} {tuple(buffer.shape)} ".encode())
    checksum.update(content)
    return checksum.hexdigest()
