"""Buffers and averaged weights in a checkpoint, next to the trained parameters.

Buffers are BatchNorm's running statistics, counts and tables. Sharding does not split them: every
rank holds all of each, and one rank writes it. They must be equal, or the ranks that did not write
would continue with another state after a load. This module also checks that a state is finite
before it is written.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardyard.errors import CheckpointError, NotFiniteError
from shardyard.torch_private import non_persistent_buffers

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
        for name in non_persistent_buffers(module)
    }
    return {
        f"{_PREFIX}{name}": buffer for name, buffer in model.named_buffers() if name not in derived
    }


def digests(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """A short text for each buffer in host memory; equal if the buffers are."""
    return {name: _digest(buffer) for name, buffer in buffers.items()}


def check_buffers_equal(digests_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Compare what ``digests`` said on each rank; a rank may lack a buffer of another stage.

    Raises:
        CheckpointError: Two ranks hold the same buffer with other values.
    """
    first: dict[str, tuple[int, str]] = {}
    mismatches: dict[str, tuple[int, int]] = {}
    for rank, of_rank in enumerate(digests_by_rank):
        for name, digest in of_rank.items():
            holder, wanted = first.setdefault(name, (rank, digest))
            if digest != wanted:
                mismatches.setdefault(name, (holder, rank))
    if not mismatches:
        return
    name, (one, other) = next(iter(mismatches.items()))
    more = f" and {len(mismatches) - 1} more" if len(mismatches) > 1 else ""
    raise CheckpointError(
        f"buffer {name.removeprefix(_PREFIX)}{more} of rank {one} is not that of rank {other}. A "
        "checkpoint holds each buffer once, so after a load all ranks would continue with that of "
        "one. Batch statistics differ between ranks, as these read other samples; only torch's "
        "batch normalisation is averaged over all ranks. Make it equal before the save "
        "(all_reduce), use one process, or keep it out of the buffers."
    )


def _digest(buffer: Tensor) -> str:
    content = buffer.contiguous().flatten().view(torch.uint8).numpy().data
    # The same bytes may be another buffer: dtype and shape belong to the digest.
    checksum = hashlib.sha256(f"{buffer.dtype} {tuple(buffer.shape)} ".encode())
    checksum.update(content)
    return checksum.hexdigest()


# No checkpoint may hold a state from which training cannot continue.
#
# The smallest and the largest element of a tensor are found in one pass and without a copy. Both
# are NaN where one element is, so these two numbers show everything that is not finite.

_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Formats that torch cannot compare; they are widened for it."""

_TOLD = 3
"""Tensors that a message names."""


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Describe each tensor that is not finite, such as ``model.x holds NaN``."""
    found = ((name, _nonfinite_kind(name, tensor)) for name, tensor in tensors.items())
    return [f"{name} holds {what}" for name, what in found if what is not None]


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that a state is finite.

    Raises:
        NotFiniteError: Names the first tensors and what they hold.
    """
    found = not_finite(tensors)
    if found:
        more = f" and {len(found) - _TOLD} more tensors" if len(found) > _TOLD else ""
        raise NotFiniteError(", ".join(found[:_TOLD]) + more)


def not_finite_in_file(path: Path) -> list[str]:
    """The same for the tensors of a safetensors file, read one at a time.

    Raises:
        SafetensorError: The file is torn.
    """
    with safe_open(path, framework="pt") as file:
        messages: Iterable[list[str]] = [
            not_finite({name: file.get_tensor(name)})
            for name in file.keys()  # noqa: SIM118 (it is no dict)
        ]
        return [text for texts in messages for text in texts]


def _nonfinite_kind(name: str, tensor: Tensor) -> str | None:
    if not tensor.numel() or not tensor.is_floating_point():
        return None
    values = tensor.float() if tensor.dtype in _NARROW else tensor
    least, most = (end.item() for end in torch.aminmax(values))
    if math.isnan(least) or math.isnan(most):
        return "NaN"
    # a buffer may be infinite on purpose: a mask, or the bounds of what has been seen so far
    if is_buffer(name) or (math.isfinite(least) and math.isfinite(most)):
        return None
    return "an infinity"


_AVERAGE_PREFIX = "average."


def ema_name(name: str) -> str:
    """The name, in a checkpoint, of the average of a tensor, from that one's name there."""
    return f"{_AVERAGE_PREFIX}{name}"


def is_ema(name: str) -> bool:
    """Whether a tensor of a checkpoint is an average, by its name there."""
    return name.startswith(_AVERAGE_PREFIX)


def inference_name(name: str, saved: Collection[str]) -> str:
    """The tensor to read for one of a model that is to be used: its average, if there is one.

    Args:
        name: Of the tensor that is trained on, in a checkpoint.
        saved: All names there.
    """
    averaged = ema_name(name)
    return averaged if averaged in saved else name
