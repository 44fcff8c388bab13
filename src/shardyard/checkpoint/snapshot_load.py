"""Restore from snapshots: the newest that all ranks find, read as a checkpoint's files are.

A rank finds a snapshot where its own slot of the same world size holds it, or where the slots on
its node hold the whole state together. Which one is taken is agreed by all ranks, and no tensor of
it is used before its checksum was compared on every rank that reads it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from shardyard.checkpoint.load import SavedTensors, meet
from shardyard.checkpoint.snapshot_slot import Moment, Sealed, read_slot
from shardyard.checkpoint.staging import Memory
from shardyard.checkpoint.verify import FORMAT
from shardyard.config.snapshots import slot_labels


class Refused(NamedTuple):
    """A snapshot that cannot be trusted; in JSON ``[step, reason]``."""

    step: int
    reason: str


@dataclass(frozen=True)
class FoundSnapshot:
    """The snapshot to go on from, on this rank."""

    moment: Moment
    slots: tuple[Sealed, ...]
    """That this rank reads."""

    @property
    def values(self) -> dict[str, Any]:
        """What is no tensor; the same in all slots."""
        return self.slots[0].values

    def fill(
        self, tensors: dict[str, Tensor], *, of_others: Collection[str], allow_extra: bool
    ) -> None:
        """As ``load_tensors``, of any layout that the slots are enough for."""
        saved = _metadata(self.slots)
        found = SavedTensors(str(self), FORMAT, SlotReader(self.slots), saved)
        elsewhere = set(of_others) & saved.keys()  # a rank's own slot holds its own stage
        found.fill(tensors, of_others=elsewhere, allow_extra=allow_extra)

    def __str__(self) -> str:
        return f"the snapshot of step {self.moment.step} in memory"


def newest_snapshot(
    memory: Memory,
    *,
    local_ranks: int,
    group: dist.ProcessGroup,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> tuple[FoundSnapshot | None, tuple[Refused, ...]]:
    """The newest snapshot that all ranks find and can trust. All ranks call it.

    Args:
        local_ranks: Workers of this node, whose slots are looked at.
        group: A gloo group of all ranks.
        timeout_s: Seconds to wait for all ranks to arrive.

    Returns:
        With it the newer ones that were refused, the same on every rank.
    """
    meet(group, timeout_s)
    held = _sealed(memory, local_ranks)
    usable = {
        moment: slots
        for moment in {each.moment for each in held}
        if (slots := _sufficient(held, moment, rank=rank, world_size=world_size))
    }
    by_rank = _of_all_ranks(sorted(usable), group, world_size)
    common = set.intersection(*(set(moments) for moments in by_rank))
    refused: list[Refused] = []
    for moment in sorted(map(Moment._make, common), reverse=True):
        slots = usable[moment]
        damaged = [each.rank for each in slots if each.is_damaged()]
        found = _of_all_ranks(damaged, group, world_size)
        ranks = sorted({number for each in found for number in each})
        if not ranks:
            return FoundSnapshot(moment, slots), tuple(refused)
        told = ", ".join(map(str, ranks))
        refused.append(Refused(moment.step, f"what rank {told} held differs from its checksum"))
    return None, tuple(refused)


def _sealed(memory: Memory, local_ranks: int) -> list[Sealed]:
    """What the slots on this node hold."""
    labels = [label for local in range(local_ranks) for label in slot_labels(local)]
    pieces = [piece for label in labels if (piece := memory(label)) is not None]
    return [sealed for piece in pieces if (sealed := read_slot(piece)) is not None]


def _of_all_ranks(mine: Any, group: dist.ProcessGroup, world_size: int) -> list[Any]:
    by_rank: list[Any] = [None] * world_size
    dist.all_gather_object(by_rank, mine, group=group)
    return by_rank


def _sufficient(
    held: Sequence[Sealed], moment: Moment, *, rank: int, world_size: int
) -> tuple[Sealed, ...]:
    """The slots that a rank reads a snapshot from; empty if they lack something of it."""
    of_moment = [each for each in held if each.moment == moment]
    own = [each for each in of_moment if each.rank == rank and each.world_size == world_size]
    if own:
        return tuple(own)
    saved = _metadata(of_moment)
    are_whole = all(
        sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()
        for entry in saved.values()
    )
    return tuple(of_moment) if are_whole and len(saved) == of_moment[0].names else ()


def _metadata(slots: Sequence[Sealed]) -> dict[str, TensorStorageMetadata]:
    """Shape and shards of every tensor; of shards that several ranks hold one."""
    saved: dict[str, TensorStorageMetadata] = {}
    for name, piece in ((name, each) for slot in slots for name, each in slot.pieces.items()):
        empty = TensorStorageMetadata(
            TensorProperties(dtype=piece.dtype), torch.Size(piece.whole), chunks=[]
        )
        entry = saved.setdefault(name, empty)
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
        if chunk not in entry.chunks and (chunk.sizes.numel() or not entry.size.numel()):
            entry.chunks.append(chunk)
    return saved


class SlotReader:
    """Reads shards in slots, as torch's reader does those in files."""

    def __init__(self, slots: Sequence[Sealed]) -> None:
        self._slot_of: dict[tuple[str, tuple[int, ...]], Sealed] = {}
        for slot in slots:
            for name, piece in slot.pieces.items():
                if piece.begin != piece.end or 0 in piece.whole:
                    self._slot_of.setdefault((name, piece.offsets), slot)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            index = item.storage_index
            assert index.offset is not None, index
            shard = self._slot_of[index.fqn, tuple(index.offset)].shard(index.fqn)
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            part = shard[tuple(slice(begin, begin + length) for begin, length in ends)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
