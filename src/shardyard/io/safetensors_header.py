"""The header of a safetensors file, written and read without the library.

Source: the format section of https://github.com/huggingface/safetensors: the length of a header,
the header, which is JSON, and the tensors one behind the other.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4,
    "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Name of a dtype in the header -> bytes of an element."""

_ALIGNMENT_BYTES = 64
"""Tensors begin at a multiple of this, so that a mapped file can be used in place."""


def header(tensors: Mapping[str, tuple[str, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """What comes before the tensors.

    Args:
        tensors: Dtype and shape of each, in the order in which they follow.
        about: What readers are told beside.
    """
    content: dict[str, Any] = {"__metadata__": dict(about)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


_MOST_HEADER_BYTES = 100_000_000
"""The library rejects longer headers."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    """As the header names it."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    stop: int

    @property
    def is_floating(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype.startswith(("F", "BF"))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the names, dtypes, shapes and places of all tensors of a file; no tensor is read.

    Raises:
        ValueError: The file is no safetensors file, or is cut off. The text continues a sentence
            that begins with the file's name.
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MOST_HEADER_BYTES:
            raise ValueError("is not a safetensors file: it begins with no length of a header")
        if length > size - 8:
            raise ValueError(
                f"is cut off or damaged: its header alone needs {length + 8:,} bytes, and it has "
                f"{size:,}"
            )
        text = file.read(length)
    try:
        content = json.loads(text)
        content.pop("__metadata__", None)
        found = {
            name: StoredTensor(
                file=path,
                dtype=str(each["dtype"]),
                shape=tuple(int(side) for side in each["shape"]),
                start=8 + length + int(each["data_offsets"][0]),
                stop=8 + length + int(each["data_offsets"][1]),
            )
            for name, each in content.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError("is not a safetensors file: its header cannot be read") from error
    end = max((tensor.stop for tensor in found.values()), default=8 + length)
    if end > size:
        raise ValueError(f"is cut off: it has {size:,} of its {end:,} bytes")
    if end < size:
        raise ValueError(f"is damaged: {size - end:,} bytes follow its last tensor")
    for name, tensor in found.items():
        item = ITEM_BYTES.get(tensor.dtype)
        if item is not None and tensor.stop - tensor.start != math.prod(tensor.shape) * item:
            raise ValueError(f"is damaged: the bytes of {name} do not match its shape and dtype")
    return found


def equal_content(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two tensors byte by byte; reads up to the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.stop - one.start
        while left > 0:
            count = min(left, _COMPARED_BYTES)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


_COMPARED_BYTES = 4 * 2**20
