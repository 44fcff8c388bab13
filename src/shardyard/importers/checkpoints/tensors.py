"""Tensors as they lie in files: where their bytes are, and how they are read some at a time."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.errors import CheckpointError
from shardyard.io.digests import ITEM_BYTES

BLOCK_BYTES = 2**23
"""Bytes of a tensor in memory at once, if they are stored in the order they are written."""

NUMPY = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",  # its bits: numpy has no such number
    "F32": "<f4",
    "F64": "<f8",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
}
"""Dtype -> what numpy calls it."""

FLOATS = ("F64", "F32", "BF16", "F16")
"""Dtypes that can be converted to each other."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorChunk:
    """A part of a tensor, in one file."""

    file: Path
    first_byte: int
    shape: Shape
    at: Shape
    """Start in its tensor, one index per dimension."""
    stride: Shape | None = None
    """In elements; None: row by row."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """A tensor."""

    dtype: str
    """Dtype, as safetensors names it."""
    shape: Shape
    pieces: tuple[TensorChunk, ...]
    is_flat: bool = False
    """Whether pieces hold its elements one behind the other, for any shape."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def laid(self) -> Shape:
        """The shape in which its pieces lie."""
        return (self.elements,) if self.is_flat else self.shape

    def rows(self, start: int, stop: int) -> "TensorView":
        """Some of its rows: of one piece that lies row by row.

        Raises:
            CheckpointError: It has fewer.
        """
        (piece,) = self.pieces
        if piece.stride is not None or not 0 <= start <= stop <= self.shape[0]:
            raise CheckpointError(f"rows {start} to {stop} are not in a tensor of {self.shape}")
        row = math.prod(self.shape[1:])
        shape = (stop - start, *self.shape[1:])
        first = piece.first_byte + start * row * ITEM_BYTES[self.dtype]
        return replace(self, shape=shape, pieces=(replace(piece, first_byte=first, shape=shape),))


def concatenate(parts: Sequence[TensorView], dim: int = 0) -> TensorView:
    """Return one tensor of several, of one piece each, joined along a dimension.

    Raises:
        CheckpointError: They do not fit together.
    """
    first = parts[0]
    pieces, size = [], 0
    for part in parts:
        others = [
            part.shape[:dim] + part.shape[dim + 1 :],
            first.shape[:dim] + first.shape[dim + 1 :],
        ]
        if others[0] != others[1] or part.dtype != first.dtype:
            raise CheckpointError(
                f"parts of {part.shape} in {part.dtype} and of {first.shape} in {first.dtype} are "
                "not of one tensor"
            )
        (piece,) = part.pieces
        at = tuple(size if number == dim else 0 for number in range(len(part.shape)))
        pieces.append(replace(piece, at=at))
        size += part.shape[dim]
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return TensorView(dtype=first.dtype, shape=shape, pieces=tuple(pieces))


def check_cover(name: str, tensor: TensorView) -> TensorView:
    """The tensor with each piece once, in order.

    Raises:
        CheckpointError: A part of it is missing, is there twice, or lies outside.
    """
    pieces = sorted(set(tensor.pieces), key=lambda piece: piece.at)
    laid = tensor.laid
    for piece in pieces:
        ends = [at + size for at, size in zip(piece.at, piece.shape, strict=True)]
        if min(piece.at, default=0) < 0 or any(map(int.__gt__, ends, laid)):
            raise CheckpointError(
                f"{name}: a part at {piece.at} of {piece.shape} is not in a tensor of {laid}"
            )
    pieces = [piece for piece in pieces if piece.elements]
    if sum(piece.elements for piece in pieces) != tensor.elements or _overlap(pieces):
        raise CheckpointError(
            f"{name}: its {len(pieces)} parts do not cover its {laid} elements, each once"
        )
    return replace(tensor, pieces=tuple(pieces))


def _overlap(pieces: Sequence[TensorChunk]) -> bool:
    """Whether two of them have an element in common; in the order of where they begin."""
    for number, one in enumerate(pieces):
        for other in pieces[number + 1 :]:
            if one.at and other.at[0] >= one.at[0] + one.shape[0]:
                break  # so are all after it
            pairs = zip(one.at, one.shape, other.at, other.shape, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in pairs):
                return True
    return False


def is_contiguous(tensor: TensorView) -> bool:
    """Whether its pieces follow each other as its rows do."""
    return all(piece.shape[1:] == tensor.laid[1:] for piece in tensor.pieces)


def copy(tensor: TensorView, into: int) -> Iterator[int]:
    """Write its bytes unchanged, within the kernel; yields how many, again and again.

    Args:
        into: An open file, at its position.

    Raises:
        OSError: A file cannot be read, or the kernel does not copy between these two.
        CheckpointError: A file is shorter than it said.
    """
    for piece in tensor.pieces:
        left, at = piece.elements * ITEM_BYTES[tensor.dtype], piece.first_byte
        with piece.file.open("rb", buffering=0) as file:
            while left:
                count = os.copy_file_range(file.fileno(), into, min(left, BLOCK_BYTES), at)
                if not count:
                    raise _cut_off(piece.file)
                left -= count
                at += count
                yield count


def can_be_copied(tensor: TensorView, dtype: str) -> bool:
    """Whether its bytes are written as they lie."""
    is_row_by_row = all(piece.stride is None for piece in tensor.pieces)
    return tensor.dtype == dtype and is_row_by_row and is_contiguous(tensor)


def blocks(tensor: TensorView, dtype: str) -> Iterator[Any]:
    """Its bytes, row by row, in another dtype or its own.

    Pieces that lie in this order pass through a few megabytes; of others the tensor is put together
    in memory, whole.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: A file is shorter than it said.
    """
    if is_contiguous(tensor):
        for piece in tensor.pieces:
            for block in _elements(piece, tensor.dtype):
                yield converted(block, tensor.dtype, dtype).view(np.uint8).data
        return
    whole = np.empty(tensor.laid, NUMPY[tensor.dtype])
    for piece in tensor.pieces:
        place = whole[tuple(map(slice, piece.at, map(int.__add__, piece.at, piece.shape)))]
        place[...] = np.concatenate(list(_elements(piece, tensor.dtype))).reshape(piece.shape)
    flat = whole.reshape(-1)
    step = BLOCK_BYTES // flat.itemsize
    for start in range(0, len(flat), step):
        block = converted(flat[start : start + step], tensor.dtype, dtype)
        yield block.view(np.uint8).data


def _elements(piece: TensorChunk, dtype: str) -> Iterator[Any]:
    """The elements of a piece, flat, in blocks."""
    item = np.dtype(NUMPY[dtype])
    with piece.file.open("rb", buffering=0) as file:
        file.seek(piece.first_byte)
        if piece.stride is None:
            left = piece.elements
            while left:
                block = _read(file, min(left, BLOCK_BYTES // item.itemsize), item)
                left -= len(block)
                yield block
            return
        extent = 1 + sum(map(int.__mul__, (size - 1 for size in piece.shape), piece.stride))
        strides = [each * item.itemsize for each in piece.stride]
        flat = _read(file, extent, item)
        yield np.lib.stride_tricks.as_strided(flat, piece.shape, strides).reshape(-1)


def _read(file: Any, elements: int, item: Any) -> Any:
    block = np.empty(elements, item)
    into = block.view(np.uint8).data
    while into:
        count = file.readinto(into)
        if not count:
            raise _cut_off(file.name)
        into = into[count:]
    return block


def _cut_off(file: Path | str) -> CheckpointError:
    return CheckpointError(
        f"{file} ends within a tensor. It was cut off when it was written or copied: copy it "
        "again, or import an earlier checkpoint."
    )


def converted(block: Any, source: str, target: str) -> Any:
    """Elements in another dtype, rounded to the nearest, ties to even, as torch does."""
    if source == target:
        return block
    assert source in FLOATS and target in FLOATS, (source, target)
    if source == "BF16":
        block = (block.astype("<u4") << 16).view("<f4")
    if target != "BF16":
        with np.errstate(over="ignore"):  # what is too large for half a word is infinite, as there
            return block.astype(NUMPY[target])
    bits = block.astype("<f4").view("<u4")
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint16(0x7FC0), rounded).astype("<u2")


# What is found in a checkpoint, whatever wrote it.

STEPS = ("step", "global_step", "global_steps", "iteration")
"""Names for the number of the last step."""


@dataclass(frozen=True, kw_only=True)
class SourceCheckpoint:
    """Tensors by name, and the other contents of a checkpoint."""

    format: str
    """In words."""
    path: Path
    tensors: Mapping[str, TensorView]
    step: int | None
    """After which it was saved; None: it does not say."""
    other_state: tuple[str, ...] = ()
    """Other contents that are no weights, such as an optimizer's state, unless in the tensors."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the user who imports it."""


def step_in(values: Mapping[str, object]) -> int | None:
    """The step that a checkpoint's loose values name."""
    for name in STEPS:
        found = [
            value
            for key, value in values.items()
            if key.rpartition(".")[2] == name and type(value) is int
        ]
        if found:
            return int(found[0])
    return None


def top_level_names(names: Iterable[str]) -> set[str]:
    """Return the first steps of dotted names."""
    return {name.partition(".")[0] for name in names}
