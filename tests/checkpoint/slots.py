"""Slots of snapshots as a worker seals them, for tests that need no training."""

import json
import mmap
from dataclasses import replace

import torch
from torch import Tensor

from shardyard.checkpoint.snapshots.slot import SnapshotId
from shardyard.checkpoint.snapshots.slot_writer import Slot, SlotLayout


def room_for(state: dict[str, Tensor], *, rank: int = 0, world_size: int = 1) -> SlotLayout:
    """As if each tensor were one rank's part of a larger one, cut along its first dimension."""
    room = SlotLayout(state)
    if world_size > 1:
        for name, piece in room.pieces.items():
            rows, *rest = piece.shape
            room.pieces[name] = replace(
                piece, offsets=(rank * rows, *[0] * len(rest)), whole=(world_size * rows, *rest)
            )
        room.pieces_json = json.dumps({name: each.to_json() for name, each in room.pieces.items()})
    return room


def seal(
    memory: mmap.mmap, state: dict[str, Tensor], moment: SnapshotId, *, rank: int = 0,
    world_size: int = 1,
) -> None:  # fmt: skip
    """Take a snapshot of a rank's state."""
    slot = Slot(memory, room_for(state, rank=rank, world_size=world_size))
    slot.clear()
    for name, tensor in state.items():
        slot.shards[name].copy_(tensor)
    values = json.dumps({"at": moment.step})
    slot.seal(moment, values, rank=rank, world_size=world_size, names=len(state))


def slot_of(
    state: dict[str, Tensor], moment: SnapshotId, *, rank: int = 0, world_size: int = 1
) -> mmap.mmap:
    """Memory of this process that holds a snapshot."""
    memory = mmap.mmap(-1, room_for(state).slot_bytes)
    seal(memory, state, moment, rank=rank, world_size=world_size)
    return memory


def rows(value: float, count: int = 3) -> dict[str, Tensor]:
    """A state of two tensors."""
    return {
        "model.w": torch.full((count, 5), float(value)),
        "optim.w": torch.full((count,), value + 0.5),
    }
