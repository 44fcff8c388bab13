"""One slot of memory that holds a snapshot: the state of one rank after one step.

The memory belongs to the node's agent, so what is in it outlives the worker that wrote it. A slot:

    head      mark, lengths, a checksum of the text; without the mark the slot holds nothing
    text      JSON: step, generation, rank, what is no tensor, place of each tensor in the whole
    tensors   each at a multiple of 64 bytes

The mark is taken away before anything else changes and is written last, so that a worker that is
killed in between leaves an empty slot and never half of a state.
"""

import json
import math
import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.checkpoint.staging import local_shard
from shardyard.checkpoint.tensor_file import DTYPES
from shardyard.checkpoint.verify import FORMAT
from shardyard.errors import CheckpointError
from shardyard.models.local_shard import place_of
from shardyard.units import format_bytes

_MARK = b"SHYDSNAP"
_HEAD = struct.Struct("<8sQQQL")
"""Mark, bytes of the text, where tensors begin, their bytes, CRC-32 of the text."""

_ALIGNMENT = 64
_VALUES_ROOM = 2**20
"""For what is no tensor: its text grows by a few digits from step to step."""

_SUMMED_WORDS = 2**16
"""64-bit words of one sum."""

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Moment(NamedTuple):
    """What tells one snapshot of a run from another."""

    step: int
    generation: int
    """In which it was taken: after a loss a step is reached again, and by other ranks."""


NEVER = Moment(-1, -1)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where one tensor's shard lies, in the slot and in the whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Of the shard in the whole."""
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
        dtype, shape, offsets, whole, begin = content
        return Piece(
            dtype=_TORCH_DTYPES[dtype], shape=tuple(shape), offsets=tuple(offsets),
            whole=tuple(whole), begin=begin,
        )  # fmt: skip


class Room:
    """How one rank's state lies in each of its slots; the same as long as its layout is."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.pieces: dict[str, Piece] = {}
        begin = 0
        for name, tensor in tensors.items():
            offsets = place_of(tensor)[0] if isinstance(tensor, DTensor) else (0,) * tensor.dim()
            piece = Piece(
                dtype=tensor.dtype, shape=tuple(local_shard(tensor).shape), offsets=offsets,
                whole=tuple(tensor.shape), begin=begin,
            )  # fmt: skip
            self.pieces[name] = piece
            begin = -(-piece.end // _ALIGNMENT) * _ALIGNMENT
        self.tensors_bytes = begin
        self.layout = json.dumps({name: each.to_json() for name, each in self.pieces.items()})
        head = _HEAD.size + len(self.layout) + _VALUES_ROOM
        self.tensors_at = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def slot_bytes(self) -> int:
        return self.tensors_at + self.tensors_bytes


class Slot:
    """A slot that this rank writes."""

    def __init__(self, memory: mmap.mmap, room: Room) -> None:
        self._memory = memory
        self._room = room
        found = read_slot(memory)
        self.moment = NEVER if found is None else found.moment
        """Of the snapshot that it holds."""
        self.content = _content(memory, room.tensors_at, room.tensors_bytes)
        """The bytes of all tensors."""
        self.shards = {
            name: self.content[each.begin : each.end].view(each.dtype).view(each.shape)
            for name, each in room.pieces.items()
        }
        """To be filled between ``clear`` and ``seal``."""

    def clear(self) -> None:
        """Let the slot hold nothing, before anything in it changes."""
        self._memory[: len(_MARK)] = bytes(len(_MARK))
        self.moment = NEVER

    def seal(self, moment: Moment, values_json: str, **facts: int) -> None:
        """Let the slot hold what its tensors are now.

        Raises:
            CheckpointError: What is no tensor has no room.
        """
        room = self._room
        fields = {"format": FORMAT, "moment": moment, **facts, "checksum": checksum(self.content)}
        head = json.dumps(fields)[1:-1]
        text = f'{{{head}, "values": {values_json}, "tensors": {room.layout}}}'.encode()
        if _HEAD.size + len(text) > room.tensors_at:
            raise CheckpointError(
                f"a snapshot has room for {format_bytes(_VALUES_ROOM)} of what is no tensor, and "
                f"this state has {format_bytes(len(values_json))} of it. Set "
                "elastic.snapshot_every=null."
            )
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        packed = _HEAD.pack(_MARK, len(text), room.tensors_at, room.tensors_bytes, zlib.crc32(text))
        self._memory[len(_MARK) : _HEAD.size] = packed[len(_MARK) :]
        self._memory[: len(_MARK)] = _MARK
        self.moment = moment


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """What a slot holds."""

    moment: Moment
    rank: int
    world_size: int
    names: int
    """Tensors of the whole state, those of other pipeline stages included."""
    values: dict[str, Any]
    pieces: dict[str, Piece]
    checksum: int
    content: Tensor
    """The bytes of all tensors, uint8, in the slot itself."""

    def shard(self, name: str) -> Tensor:
        """This rank's part of a tensor, not copied."""
        piece = self.pieces[name]
        return self.content[piece.begin : piece.end].view(piece.dtype).view(piece.shape)

    def is_damaged(self) -> bool:
        """Whether the tensors are not what they were when the slot was sealed."""
        return checksum(self.content) != self.checksum


def read_slot(memory: mmap.mmap) -> Sealed | None:
    """What a slot holds; None if it holds nothing, or its text is not what was written."""
    if len(memory) < _HEAD.size:
        return None
    mark, text_bytes, tensors_at, tensors_bytes, crc = _HEAD.unpack_from(memory)
    if mark != _MARK or tensors_at + tensors_bytes > len(memory):
        return None
    text = memory[_HEAD.size : _HEAD.size + text_bytes]
    if zlib.crc32(text) != crc:
        return None
    fields = json.loads(text)
    if fields.pop("format") != FORMAT:
        return None
    fields["moment"] = Moment(*fields["moment"])
    pieces = {name: Piece.from_json(each) for name, each in fields.pop("tensors").items()}
    return Sealed(**fields, pieces=pieces, content=_content(memory, tensors_at, tensors_bytes))


def checksum(content: Tensor) -> int:
    """CRC-32 of sums of 64-bit words: as quick as memory is read, where a CRC of all is not.

    Args:
        content: uint8, contiguous, a multiple of 8 bytes.
    """
    words = content.numpy().view(np.uint64)  # sums wrap
    whole = len(words) // _SUMMED_WORDS * _SUMMED_WORDS
    sums = words[:whole].reshape(-1, _SUMMED_WORDS).sum(axis=1)
    return zlib.crc32(words[whole:].sum().tobytes(), zlib.crc32(sums.tobytes()))


def _content(memory: mmap.mmap, begin: int, size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
