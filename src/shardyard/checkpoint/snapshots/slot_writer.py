"""The slots that a rank writes its snapshots to: how its state lies in them, and how one is sealed.

Apart from what a slot is (``slot.py``), which agents read too: they need no DTensor, whose
import takes half a second.
"""

import json
import mmap
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.checkpoint.snapshots.slot import (
    ALIGNMENT_BYTES,
    HEAD_BYTES,
    NEVER,
    Piece,
    SlotHeader,
    SnapshotId,
    checksum,
    content_of,
    empty,
    read_slot,
    write_head,
)
from shardyard.checkpoint.staging import local_shard
from shardyard.checkpoint.verify import FORMAT
from shardyard.errors import CheckpointError
from shardyard.models.local_shard import shard_bounds
from shardyard.units import format_bytes

_VALUES_ROOM = 2**20
"""For what is no tensor: its text grows by a few digits from step to step."""


class SlotLayout:
    """Layout of one rank's state in each of its slots; it changes only with the state's layout."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.pieces: dict[str, Piece] = {}
        begin = 0
        for name, tensor in tensors.items():
            offsets = (
                shard_bounds(tensor)[0] if isinstance(tensor, DTensor) else (0,) * tensor.dim()
            )
            piece = Piece(
                dtype=tensor.dtype, shape=tuple(local_shard(tensor).shape), offsets=offsets,
                whole=tuple(tensor.shape), begin=begin,
            )  # fmt: skip
            self.pieces[name] = piece
            begin = -(-piece.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.tensors_bytes = begin
        # Made once: a snapshot is sealed every few steps, and the places of tensors stay the same.
        self.pieces_json = json.dumps({name: each.to_json() for name, each in self.pieces.items()})
        head = HEAD_BYTES + len(self.pieces_json) + _VALUES_ROOM
        self.tensors_at = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def slot_bytes(self) -> int:
        return self.tensors_at + self.tensors_bytes


class Slot:
    """A slot that this rank writes."""

    def __init__(self, memory: mmap.mmap, layout: SlotLayout) -> None:
        self._memory = memory
        self._layout = layout
        found = read_slot(memory)
        self.snapshot_id = NEVER if found is None else found.snapshot_id
        """Moment of the snapshot that the slot holds."""
        self.content = content_of(memory, layout.tensors_at, layout.tensors_bytes)
        """The bytes of all tensors."""
        self.shards = {
            name: self.content[each.begin : each.end].view(each.dtype).view(each.shape)
            for name, each in layout.pieces.items()
        }
        """To be filled between ``clear`` and ``seal``."""

    def clear(self) -> None:
        """Empty the slot, before anything in it changes."""
        empty(self._memory)
        self.snapshot_id = NEVER

    def seal(self, snapshot_id: SnapshotId, values_json: str, **metadata: int) -> None:
        """Let the slot hold what its tensors are now.

        Raises:
            CheckpointError: What is no tensor has no room.
        """
        room = self._layout
        fields = {
            "format": FORMAT,
            "moment": snapshot_id,
            **metadata,
            "checksum": checksum(self.content),
        }
        head = json.dumps(fields)[1:-1]
        text = f'{{{head}, "values": {values_json}, "tensors": {room.pieces_json}}}'.encode()
        if HEAD_BYTES + len(text) > room.tensors_at:
            raise CheckpointError(
                f"a snapshot has room for {format_bytes(_VALUES_ROOM)} of values that are not "
                f"tensors, and this state has {format_bytes(len(values_json))} of them. Set "
                "elastic.snapshot_every=null."
            )
        write_head(
            self._memory, SlotHeader(len(text), room.tensors_at, room.tensors_bytes, 0), text
        )
        self.snapshot_id = snapshot_id
