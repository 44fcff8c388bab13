"""The snapshots that an agent holds: those of its own ranks and of the ranks of the node before.

All of it is memory that the agent owns and its workers map. Workers write the slots of their own
ranks; what comes from the node before, this process writes.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardyard.checkpoint.snapshots.snapshot_fetch import Holding
from shardyard.checkpoint.snapshots.snapshot_slot import (
    HEAD_BYTES,
    Head,
    Moment,
    SlotText,
    read_head,
)
from shardyard.checkpoint.snapshots.snapshot_wire import SnapshotRefusedError
from shardyard.config.snapshots import neighbour_labels, slot_labels
from shardyard.elastic.agent_memory import AgentMemory
from shardyard.memory_limit import usable_memory_bytes
from shardyard.units import format_bytes

_LEAST_SLOTS = 4
"""A node with room for less than so many slots of each of its ranks has none for its own ranks' and
their neighbours': a snapshot that is larger is described wrongly."""


class Held(NamedTuple):
    """A slot that holds something."""

    memory: mmap.mmap
    head: Head
    text: SlotText


@dataclass
class _Slot:
    """The memory of one slot, and what was read in it last."""

    memory: AgentMemory
    _view: mmap.mmap | None = None
    _read: tuple[Head, SlotText | None] | None = None

    def view(self) -> mmap.mmap | None:
        """All of it; mapped again only where it has grown."""
        if self._view is None or len(self._view) != self.memory.size_bytes():
            self._view = self.memory.view()
        return self._view

    def held(self) -> Held | None:
        """What it holds; each text is read once."""
        view = self.view()
        head = None if view is None else read_head(view)
        if view is None or head is None:
            return None
        known = self._read
        if known is None or known[0] != head:
            self._read = known = (head, _text_of(view, head))
        return None if known[1] is None else Held(view, head, known[1])


def _text_of(view: mmap.mmap, head: Head) -> SlotText | None:
    try:
        return SlotText.from_bytes(view[HEAD_BYTES : HEAD_BYTES + head.text_bytes], head)
    except ValueError:
        return None  # it is just being written anew


class HeldSnapshots:
    """All slots of one node."""

    def __init__(self, owned: Mapping[str, AgentMemory], *, local_ranks: int) -> None:
        """Args:
        owned: The agent's memory by label; of each slot at least.
        local_ranks: Of this node, and of each other.
        """
        ranks = range(local_ranks)
        self.local_ranks = local_ranks
        self._own = [[_Slot(owned[label]) for label in slot_labels(local)] for local in ranks]
        self._neighbours = [
            [_Slot(owned[label]) for label in neighbour_labels(local)] for local in ranks
        ]

    def newest(self, local_rank: int, generation: int) -> Held | None:
        """Of an own rank, taken in this generation."""
        found = [held for slot in self._own[local_rank] if (held := slot.held()) is not None]
        mine = [held for held in found if held.text.moment.generation == generation]
        return max(mine, key=lambda held: held.text.moment, default=None)

    def holdings(self) -> list[Holding]:
        """What there is, own slots first."""
        return [
            Holding(
                step=text.moment.step, generation=text.moment.generation, rank=text.rank,
                world_size=text.world_size, slot_bytes=head.slot_bytes,
            )
            for _, head, text in self._all()
        ]  # fmt: skip

    def find(self, moment: Moment, rank: int, world_size: int) -> Held | None:
        """A certain one."""
        asked = (moment, rank, world_size)
        found = (
            held
            for held in self._all()
            if (held.text.moment, held.text.rank, held.text.world_size) == asked
        )
        return next(found, None)

    def place_for(self, local_rank: int, head: Head) -> mmap.mmap:
        """Memory for the next snapshot of a rank of the node before: where the oldest one lies.

        Raises:
            SnapshotRefusedError: It is too large, or the system refuses the memory.
        """
        most_bytes = usable_memory_bytes() // (_LEAST_SLOTS * self.local_ranks)
        if head.slot_bytes > most_bytes:
            raise SnapshotRefusedError(
                f"a snapshot of {format_bytes(head.slot_bytes)} has no room here, where each may "
                f"have {format_bytes(most_bytes)}"
            )
        slot = min(self._neighbours[local_rank], key=_age)
        try:
            slot.memory.grow(head.slot_bytes)
        except OSError as error:
            raise SnapshotRefusedError(
                f"the system refuses memory for {format_bytes(head.slot_bytes)} ({error.strerror})"
            ) from error
        view = slot.view()
        assert view is not None
        return view

    def _all(self) -> list[Held]:
        slots = [slot for kind in (self._own, self._neighbours) for of in kind for slot in of]
        return [held for slot in slots if (held := slot.held()) is not None]


def _age(slot: _Slot) -> tuple[int, int]:
    """The smallest is of the oldest, or empty."""
    held = slot.held()
    return (-1, -1) if held is None else (held.text.moment.generation, held.text.moment.step)
