"""Whether a state may be written: no checkpoint holds what training could not go on from.

The smallest and the largest element of a tensor are found in one pass and without a copy, and both
are NaN where one element is.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardyard.checkpoint.buffers import is_buffer
from shardyard.errors import NotFiniteError

_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Formats that torch cannot compare; they are widened for it."""

_TOLD = 3
"""Tensors that a message names."""


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with each tensor that is not finite, such as ``model.x holds NaN``."""
    found = ((name, _wrong(name, tensor)) for name, tensor in tensors.items())
    return [f"{name} holds {what}" for name, what in found if what is not None]


def refuse_not_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state that is not finite.

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
        found: Iterable[list[str]] = [
            not_finite({name: file.get_tensor(name)})
            for name in file.keys()  # noqa: SIM118 (it is no dict)
        ]
        return [text for texts in found for text in texts]


def _wrong(name: str, tensor: Tensor) -> str | None:
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
