"""Restore from snapshots: the newest that all ranks find, read as a checkpoint's files are.

A rank reads its own part of a snapshot where the layout is the one that took it, else the slots on
its node if these hold the whole state together, else those of all ranks. It finds a slot on its
node, where the agent keeps those of its own ranks and of the node before, or fetches it from
another node's agent. Which snapshot is taken is agreed by all ranks, and no tensor of it is used
before its checksum was compared on every rank that reads it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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

from shardyard.checkpoint.load import SavedTensors, wait_for_all_ranks
from shardyard.checkpoint.snapshots.protocol import (
    RemoteSnapshot,
    SnapshotRejectedError,
    read_remote_snapshots,
)
from shardyard.checkpoint.snapshots.slot import Sealed, SnapshotId, read_slot
from shardyard.checkpoint.staging_protocol import MemoryProvider
from shardyard.checkpoint.verify import FORMAT
from shardyard.config.formulas import peer_labels, slot_labels
from shardyard.parallel.device import free_memory_bytes


class RejectedSnapshot(NamedTuple):
    """A snapshot that cannot be trusted; in JSON ``[step, reason]``."""

    step: int
    reason: str


@dataclass(frozen=True)
class RestorableSnapshot:
    """Snapshot from which this rank continues."""

    snapshot_id: SnapshotId
    slots: tuple[Sealed, ...]
    """Slots that this rank reads."""
    is_from_peer: bool = False
    """Whether any rank found a part in the memory of another node, or what was kept for one."""
    fetched_bytes: int = 0
    """Bytes that came from other nodes, to all ranks together."""

    @property
    def values(self) -> dict[str, Any]:
        """Saved values other than tensors; the same in all slots."""
        return self.slots[0].values

    def fill(
        self, tensors: dict[str, Tensor], *, of_others: Collection[str], allow_extra: bool
    ) -> None:
        """Fill tensors like ``load_tensors``, in any layout that the slots suffice for."""
        saved = _metadata(self.slots)
        found = SavedTensors(str(self), FORMAT, SlotReader(self.slots), saved)
        elsewhere = set(of_others) & saved.keys()  # a rank's own slot holds its own stage
        found.fill(tensors, of_others=elsewhere, allow_extra=allow_extra)

    def __str__(self) -> str:
        return f"the snapshot of step {self.snapshot_id.step} in memory"


def latest_snapshot(
    memory: MemoryProvider,
    *,
    local_ranks: int,
    group: dist.ProcessGroup,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> tuple[RestorableSnapshot | None, tuple[RejectedSnapshot, ...]]:
    """Find the newest snapshot that all ranks find and can trust. All ranks call it.

    Args:
        local_ranks: Workers of this node, whose slots are searched.
        group: A gloo group of all ranks.
        timeout_s: Seconds to wait for all ranks to arrive.

    Returns:
        The snapshot, and the newer ones that were rejected, the same on every rank.
    """
    wait_for_all_ranks(group, timeout_s)
    candidates: list[_LocalSnapshot | RemoteSnapshot] = [
        *_on_this_node(memory, local_ranks),
        *read_remote_snapshots(memory),
    ]
    usable = {
        moment: parts
        for moment in {each.snapshot_id for each in candidates}
        if (parts := _parts(candidates, moment, rank, world_size, readers=local_ranks))
    }
    by_rank = _of_all_ranks(sorted(usable), group, world_size)
    common = set.intersection(*(set(moments) for moments in by_rank))
    rejected: list[RejectedSnapshot] = []
    # All ranks go through the same snapshots in one order: each costs a collective.
    for moment in sorted(map(SnapshotId._make, common), reverse=True):
        mine = _collect(usable[moment])
        told = _of_all_ranks(
            (mine.errors, mine.is_from_peer, mine.fetched_bytes), group, world_size
        )
        lacks = sorted({lack for each, _, _ in told for lack in each})
        if not lacks:
            found = RestorableSnapshot(
                moment,
                tuple(mine.slots),
                is_from_peer=any(is_of_neighbour for _, is_of_neighbour, _ in told),
                fetched_bytes=sum(fetched_bytes for _, _, fetched_bytes in told),
            )
            return found, tuple(rejected)
        rejected.append(RejectedSnapshot(moment.step, _describe_errors(lacks)))
    return None, tuple(rejected)


@dataclass(frozen=True)
class _LocalSnapshot:
    """A slot on this node."""

    slot: Sealed
    is_from_peer: bool
    """Whether it is kept for a rank of the node before."""
    bytes_to_fetch = 0

    def read(self) -> Sealed:
        """The slot itself.

        Raises:
            SnapshotRejectedError: It is damaged.
        """
        if self.slot.is_damaged():
            raise SnapshotRejectedError("differs from its checksum")
        return self.slot

    @property
    def snapshot_id(self) -> SnapshotId:
        return self.slot.snapshot_id

    @property
    def rank(self) -> int:
        return self.slot.rank

    @property
    def world_size(self) -> int:
        return self.slot.world_size


_Parts = dict[int, list[_LocalSnapshot | RemoteSnapshot]]
"""Ranks whose slots are needed, and where each may be found, nearest first."""


@dataclass
class _Collected:
    """The slots that this rank reads."""

    slots: list[Sealed] = field(default_factory=list)
    errors: list[tuple[str, int]] = field(default_factory=list)
    """Why a slot cannot be read, and whose it is."""
    is_from_peer: bool = False
    fetched_bytes: int = 0


def _on_this_node(memory: MemoryProvider, local_ranks: int) -> list[_LocalSnapshot]:
    """Return the content of the slots on this node."""
    labels = [
        (label, is_of_neighbour)
        for labels_of, is_of_neighbour in ((slot_labels, False), (peer_labels, True))
        for local in range(local_ranks)
        for label in labels_of(local)
    ]
    pieces = [(memory(label), is_of_neighbour) for label, is_of_neighbour in labels]
    return [
        _LocalSnapshot(slot, is_of_neighbour)
        for piece, is_of_neighbour in pieces
        if piece is not None and (slot := read_slot(piece)) is not None
    ]


def _of_all_ranks(value: Any, group: dist.ProcessGroup, world_size: int) -> list[Any]:
    by_rank: list[Any] = [None] * world_size
    dist.all_gather_object(by_rank, value, group=group)
    return by_rank


def _parts(
    candidates: Sequence[_LocalSnapshot | RemoteSnapshot],
    snapshot_id: SnapshotId,
    rank: int,
    world_size: int,
    *,
    readers: int,
) -> _Parts:
    """Return the parts that a rank reads a snapshot from; empty if any part is missing.

    Args:
        readers: Ranks of this node, which read at the same time.
    """
    parts: _Parts = {}
    for each in candidates:
        if each.snapshot_id == snapshot_id:
            parts.setdefault(each.rank, []).append(each)
    if not parts:
        return {}
    taken_by = next(iter(parts.values()))[0].world_size
    if taken_by == world_size and rank in parts:
        return {rank: parts[rank]}
    # the nearest comes first
    here = {
        number: places for number, places in parts.items() if isinstance(places[0], _LocalSnapshot)
    }
    slots = [each.slot for (each, *_) in here.values() if isinstance(each, _LocalSnapshot)]
    if slots and _are_whole(slots):
        return here
    needed_bytes = sum(places[0].bytes_to_fetch for places in parts.values())
    is_all = len(parts) == taken_by and needed_bytes * readers <= _fetch_budget_bytes()
    return parts if is_all else {}


def _are_whole(slots: Sequence[Sealed]) -> bool:
    """Whether slots hold the whole state together."""
    saved = _metadata(slots)
    are_whole = all(
        sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()
        for entry in saved.values()
    )
    return are_whole and len(saved) == slots[0].names


def _fetch_budget_bytes() -> int:
    """For slots that the ranks of this node fetch: half, as they build their training too."""
    return (free_memory_bytes(torch.device("cpu")) or 0) // 2


def _collect(parts: _Parts) -> _Collected:
    """Take each slot from the first place where it is right."""
    found = _Collected()
    for rank, places in parts.items():
        errors: list[tuple[str, int]] = []
        for place in places:
            try:
                found.slots.append(place.read())
            except SnapshotRejectedError as refused:
                errors.append((str(refused), rank))
                continue
            found.is_from_peer |= place.is_from_peer
            found.fetched_bytes += place.bytes_to_fetch
            break
        else:
            found.errors += errors
    return found


def _describe_errors(errors: Sequence[tuple[str, int]]) -> str:
    """Why a snapshot cannot be trusted, in words."""
    ranks: dict[str, list[str]] = {}
    for reason, rank in errors:
        ranks.setdefault(reason, []).append(str(rank))
    return "; ".join(f"what rank {', '.join(who)} held {why}" for why, who in ranks.items())


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
