"""The form of a safetensors file, written tensor by tensor.

Source: the format section of https://github.com/huggingface/safetensors: the length of a header,
the header, which is JSON, and the tensors one behind the other.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

_HEADER_ALIGNMENT_BYTES = 64
"""Tensors begin at a multiple of this, so that a mapped file can be used in place."""


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str]
) -> Iterator[memoryview]:
    """What comes before the tensors.

    Args:
        tensors: Dtype and shape of each, in the order in which they follow.
        about: What readers are told beside.
    """
    content: dict[str, Any] = {"__metadata__": dict(about)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        content[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT_BYTES)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)


def content_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, which are not copied."""
    content: memoryview = tensor.flatten().view(torch.uint8).numpy().data
    return content


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    *,
    made: Iterable[Iterable[Tensor]],
) -> None:
    """Write a file of which some rows of a tensor are in memory at a time.

    Args:
        made: Of each tensor, in the order of ``shapes``, its rows, in order.

    Raises:
        OSError: The file system refused.
    """
    with path.open("wb") as file:
        for piece in header({name: (dtype, shapes[name]) for name in shapes}, {"format": "pt"}):
            file.write(piece)
        for (name, shape), parts in zip(shapes.items(), made, strict=True):
            written = 0
            for part in parts:
                assert part.dtype == dtype, name
                written += file.write(content_of(part))
            assert written == math.prod(shape) * dtype.itemsize, name
