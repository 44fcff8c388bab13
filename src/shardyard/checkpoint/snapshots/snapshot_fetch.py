"""Snapshots that agents of other nodes hold: what they are, and how a rank gets one.

Each agent tells the others at the start of a generation what it holds, of its own ranks and of
those of the node before; workers read it in their agent's memory.
"""

import json
import mmap
from dataclasses import dataclass
from typing import Any

from shardyard.checkpoint.keeping import Memory
from shardyard.checkpoint.snapshots import snapshot_wire as wire
from shardyard.checkpoint.snapshots.snapshot_slot import Head, Moment, Sealed, SlotText, read_slot
from shardyard.config.snapshots import ELSEWHERE
from shardyard.io.files import parse_json


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A snapshot that an agent holds."""

    step: int
    generation: int
    rank: int
    world_size: int
    slot_bytes: int

    @property
    def moment(self) -> Moment:
        return Moment(self.step, self.generation)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One that another node's agent holds, and where that answers."""

    holding: Holding
    host: str
    port: int
    secret: bytes
    is_of_neighbour = True

    @property
    def bytes_to_fetch(self) -> int:
        return self.holding.slot_bytes

    @property
    def moment(self) -> Moment:
        return self.holding.moment

    @property
    def rank(self) -> int:
        return self.holding.rank

    @property
    def world_size(self) -> int:
        return self.holding.world_size

    def read(self) -> Sealed:
        """Get it, into memory of this process's own; its checksum was compared.

        Raises:
            SnapshotRefusedError: The agent is gone, has it no more, or what came is damaged.
        """
        try:
            with wire.meet(self.host, self.port, self.secret) as link:
                memory = wire.get(
                    link, self.moment, rank=self.rank, world_size=self.world_size, place=self._place
                )
        except (OSError, wire.SnapshotRefusedError) as error:
            raise wire.SnapshotRefusedError(f"cannot be had from {self.host} ({error})") from error
        found = read_slot(memory)
        assert found is not None  # it was read on the way
        return found

    def _place(self, text: SlotText, head: Head) -> mmap.mmap:
        asked = (self.moment, self.rank, self.world_size, self.holding.slot_bytes)
        if (text.moment, text.rank, text.world_size, head.slot_bytes) != asked:
            raise wire.SnapshotRefusedError("this is not the snapshot that was asked for")
        return mmap.mmap(-1, head.slot_bytes)


def offers_to_json(secret: bytes, agents: list[dict[str, Any]]) -> bytes:
    """What agents of other nodes hold, for the workers of this one.

    Args:
        agents: ``host`` and ``port`` of each, and in ``held`` the fields of its holdings.
    """
    return json.dumps({"secret": secret.hex(), "agents": agents}).encode()


def read_offers(memory: Memory) -> list[Offer]:
    """What agents of other nodes hold; nothing where nobody says so."""
    content = memory(ELSEWHERE)
    if content is None:
        return []
    with content:
        told = parse_json(content[:])
    secret = bytes.fromhex(told["secret"])
    return [
        Offer(holding=Holding(**held), host=agent["host"], port=agent["port"], secret=secret)
        for agent in told["agents"]
        for held in agent["held"]
    ]
