"""One slot of memory that holds a snapshot: the state of one rank after one step.

The memory belongs to the node's agent, so what is in it outlives the worker that wrote it. A
slot:

    head      mark, lengths, a checksum of the text; without the mark the slot holds nothing
    text      JSON: step, generation, rank, what is no tensor, place of each tensor in the whole
    tensors   each at a multiple of 64 bytes

The mark is taken away before anything else changes and is written last, so that a worker that is
killed in between leaves an empty slot and never half of a state.
"""

import math
import mmap
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardyard.checkpoint.safetensors_writer import DTYPES
from shardyard.checkpoint.verify import FORMAT
from shardyard.io.files import parse_json

_MARK = b"SHYDSNAP"
_HEAD = struct.Struct("<8sQQQL")
"""Mark, and what ``SlotHeader`` has."""
HEAD_BYTES = _HEAD.size

ALIGNMENT_BYTES = 64
_SUMMED_WORDS = 2**16
"""64-bit words of one sum."""

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class SnapshotId(NamedTuple):
    """Identity of a snapshot within a run."""

    step: int
    generation: int
    """In which it was taken: after a loss a step is reached again, and by other ranks."""


# It sorts before every snapshot, so an empty slot is the one that is written next.
NEVER = SnapshotId(-1, -1)


class SlotHeader(NamedTuple):
    """First fields of a filled slot, except its mark."""

    text_bytes: int
    tensors_at: int
    tensors_bytes: int
    text_crc: int
    """CRC-32 of the text."""

    @property
    def slot_bytes(self) -> int:
        return self.tensors_at + self.tensors_bytes

    def to_bytes(self) -> bytes:
        return _HEAD.pack(_MARK, *self)

    @staticmethod
    def from_bytes(content: bytes) -> "SlotHeader | None":
        """Parse a head; None: the slot is empty, or its head cannot be what was written."""
        mark, *lengths = _HEAD.unpack(content)
        head = SlotHeader(*lengths)
        begin, size = head.tensors_at, head.tensors_bytes
        is_possible = HEAD_BYTES + head.text_bytes <= begin and not (begin | size) % ALIGNMENT_BYTES
        return head if mark == _MARK and is_possible else None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Position of one tensor's shard, in the slot and in the whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offsets of the shard in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """Bytes from the first tensor."""

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        return [DTYPES[self.dtype], self.shape, self.offsets, self.whole, self.begin]

    @staticmethod
    def from_json(content: list[Any]) -> "Piece":
        """Raises:
        ValueError: It cannot be what ``to_json`` made.
        """
        dtype, *places, begin = content
        shape, offsets, whole = (tuple(map(_natural, each)) for each in places)
        is_inside = len(shape) == len(offsets) == len(whole) and all(
            offset + size <= of for offset, size, of in zip(offsets, shape, whole, strict=True)
        )
        if dtype not in _TORCH_DTYPES or not is_inside or _natural(begin) % ALIGNMENT_BYTES:
            raise ValueError(f"no place of a tensor: {content}")
        return Piece(
            dtype=_TORCH_DTYPES[dtype], shape=shape, offsets=offsets, whole=whole, begin=begin
        )  # fmt: skip


def _natural(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"no count: {number!r}")
    return number


def empty(memory: mmap.mmap) -> None:
    """Empty a slot, before anything in it changes."""
    memory[: len(_MARK)] = bytes(len(_MARK))


def write_head(memory: mmap.mmap, head: SlotHeader, text: bytes) -> None:
    """Let a slot hold what its tensors are now; the mark is written last."""
    memory[HEAD_BYTES : HEAD_BYTES + len(text)] = text
    packed = head._replace(text_crc=zlib.crc32(text)).to_bytes()
    memory[len(_MARK) : HEAD_BYTES] = packed[len(_MARK) :]
    memory[: len(_MARK)] = _MARK


@dataclass(frozen=True, kw_only=True)
class SlotText:
    """Content of a slot's text."""

    snapshot_id: SnapshotId
    rank: int
    world_size: int
    names: int
    """Tensors of the whole state, those of other pipeline stages included."""
    values: dict[str, Any]
    pieces: dict[str, Piece]
    checksum: int

    @staticmethod
    def from_bytes(text: bytes, head: SlotHeader) -> "SlotText":
        """Raises:
        ValueError: It is not what was written, or names tensors outside of the slot.
        """
        if zlib.crc32(text) != head.text_crc:
            raise ValueError("its text differs from its checksum")
        try:
            fields = parse_json(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            step, generation = map(_natural, fields.pop("moment"))
            tensors = fields.pop("tensors").items()
            pieces = {name: Piece.from_json(each) for name, each in tensors}
            found = SlotText(snapshot_id=SnapshotId(step, generation), pieces=pieces, **fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its text has another form ({error!r})") from error
        if _natural(found.rank) >= _natural(found.world_size) or not isinstance(found.values, dict):
            raise ValueError(f"rank {found.rank} does not exist in a run of {found.world_size}")
        if any(piece.end > head.tensors_bytes for piece in pieces.values()):
            raise ValueError("it names tensors that it has no room for")
        return found


@dataclass(frozen=True, kw_only=True)
class Sealed(SlotText):
    """Content of a slot."""

    content: Tensor
    """The bytes of all tensors, uint8, in the slot itself."""

    def shard(self, name: str) -> Tensor:
        """This rank's part of a tensor, not copied."""
        piece = self.pieces[name]
        return self.content[piece.begin : piece.end].view(piece.dtype).view(piece.shape)

    def is_damaged(self) -> bool:
        """Whether the tensors are not what they were when the slot was sealed."""
        return checksum(self.content) != self.checksum


def read_head(memory: mmap.mmap) -> SlotHeader | None:
    """Return the head of a slot; None if the slot is empty."""
    if len(memory) < HEAD_BYTES:
        return None
    head = SlotHeader.from_bytes(memory[:HEAD_BYTES])
    return None if head is None or head.slot_bytes > len(memory) else head


def read_slot(memory: mmap.mmap) -> Sealed | None:
    """Return the content of a slot; None if it is empty, or its text is not what was written."""
    head = read_head(memory)
    if head is None:
        return None
    try:
        text = SlotText.from_bytes(memory[HEAD_BYTES : HEAD_BYTES + head.text_bytes], head)
    except ValueError:
        return None
    return Sealed(**vars(text), content=content_of(memory, head.tensors_at, head.tensors_bytes))


def checksum(content: Tensor) -> int:
    """CRC-32 of sums of 64-bit words: as quick as memory is read, where a CRC of all is not.

    Args:
        content: uint8, contiguous, a multiple of 8 bytes.
    """
    words = content.numpy().view(np.uint64)  # sums wrap
    whole = len(words) // _SUMMED_WORDS * _SUMMED_WORDS
    sums = words[:whole].reshape(-1, _SUMMED_WORDS).sum(axis=1)
    return zlib.crc32(words[whole:].sum().tobytes(), zlib.crc32(sums.tobytes()))


def content_of(memory: mmap.mmap, begin: int, size: int) -> Tensor:
    """Bytes of a slot as a tensor, not copied."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
