"""A safetensors file, written tensor by tensor."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardyard.io import digests as safetensors_header

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


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str]
) -> bytes:
    """Return the bytes that come before the tensors.

    Args:
        tensors: Dtype and shape of each, in the order in which they follow.
        about: Further entries for readers.
    """
    named = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()}
    return safetensors_header.header(named, about)


def content_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, which are not copied."""
    # As bytes: numpy has neither bfloat16 nor the formats of fp8.
    content: memoryview = tensor.flatten().view(torch.uint8).numpy().data
    return content


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    *,
    tensor_rows: Iterable[Iterable[Tensor]],
) -> None:
    """Write a file with only some rows of a tensor in memory at a time.

    Args:
        tensor_rows: Rows of each tensor, in order; tensors are in the order of ``shapes``.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("wb") as file:
        file.write(header({name: (dtype, shapes[name]) for name in shapes}, {"format": "pt"}))
        for (name, shape), parts in zip(shapes.items(), tensor_rows, strict=True):
            written = 0
            for part in parts:
                assert part.dtype == dtype, name
                written += file.write(content_of(part))
            # The header with all offsets is written already: one short tensor would shift the rest.
            assert written == math.prod(shape) * dtype.itemsize, name
