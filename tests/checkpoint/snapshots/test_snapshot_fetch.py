"""A rank that goes on from what other nodes' agents hold: which snapshot, and which parts of it."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardyard.checkpoint.snapshots.load import (
    RejectedSnapshot,
    RestorableSnapshot,
    latest_snapshot,
)
from shardyard.checkpoint.snapshots.protocol import remote_snapshots_to_json
from shardyard.checkpoint.snapshots.slot import SnapshotId
from shardyard.config.formulas import ELSEWHERE, peer_labels, slot_labels
from shardyard.elastic.peer_snapshots import ExpectedSnapshots, SnapshotServer, SnapshotStore
from shardyard.elastic.shared_memory import AgentMemory
from tests.checkpoint.kept_memory import FolderMemory
from tests.checkpoint.slots import room_for, rows, seal

SECRET = b"of this generation"
SLOT_BYTES = room_for(rows(0)).slot_bytes


class OtherNode:
    """An agent that holds snapshots and answers."""

    def __init__(self) -> None:
        labels = [*slot_labels(0), *peer_labels(0)]
        owned = {label: memory for label in labels if (memory := AgentMemory.create(label))}
        self.memories = list(owned.values())
        self.held = SnapshotStore(owned, local_ranks=1)
        self.server = SnapshotServer(
            "127.0.0.1", SECRET, self.held, ExpectedSnapshots(9, range(1), 1)
        )

    def hold(self, *snapshots: tuple[int, int, int]) -> None:
        """Step, rank and world size of each."""
        for memory, (step, rank, world_size) in zip(self.memories, snapshots, strict=False):
            memory.grow(SLOT_BYTES)
            view = memory.view()
            assert view is not None
            seal(view, rows(step + rank), SnapshotId(step, 0), rank=rank, world_size=world_size)

    def told(self) -> bytes:
        """What it says that it holds, for the workers of another node."""
        held = [asdict(holding) for holding in self.held.holdings()]
        agent = {"host": "127.0.0.1", "port": self.server.port, "held": held}
        return remote_snapshots_to_json(SECRET, [agent])

    def close(self) -> None:
        self.server.close()
        for memory in self.memories:
            os.close(memory.descriptor)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherNode]:
    for label in (*slot_labels(0), *peer_labels(0)):  # removed again afterwards
        monkeypatch.setenv(f"SHARDYARD_MEMORY_{label.upper()}", "")
    node = OtherNode()
    yield node
    node.close()


@pytest.fixture
def memory(tmp_path: Path) -> FolderMemory:
    (tmp_path / "memory").mkdir()
    return FolderMemory(tmp_path / "memory")


def keep(
    memory: FolderMemory, label: str, step: int, *, rank: int = 0, world_size: int = 1
) -> None:
    piece = memory(label, SLOT_BYTES)
    assert piece is not None
    seal(piece, rows(step + rank), SnapshotId(step, 0), rank=rank, world_size=world_size)


def newest(
    memory: FolderMemory, group: dist.ProcessGroup, other: OtherNode
) -> tuple[RestorableSnapshot | None, tuple[RejectedSnapshot, ...]]:
    """As the only rank of a run finds it."""
    (memory.folder / ELSEWHERE).write_bytes(other.told())
    return latest_snapshot(memory, local_ranks=1, group=group, rank=0, world_size=1, timeout_s=60.0)


def weights(found: RestorableSnapshot, count: int = 3) -> list[float]:
    filled = {name: torch.zeros_like(each) for name, each in rows(0, count).items()}
    found.fill(filled, of_others=(), allow_extra=False)
    return [row[0].item() for row in filled["model.w"]]


def test_what_this_node_holds_is_not_fetched(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    other.hold((4, 0, 1), (6, 0, 1))
    keep(memory, "snapshot_0_0", 6)
    found, _ = newest(memory, alone, other)
    assert found is not None and found.snapshot_id.step == 6
    assert (found.is_from_peer, found.fetched_bytes) == (False, 0)


def test_a_newer_one_of_another_node_is_fetched(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    other.hold((4, 0, 1), (6, 0, 1))
    keep(memory, "snapshot_0_0", 4)
    found, _ = newest(memory, alone, other)
    assert found is not None and (found.snapshot_id.step, found.values) == (6, {"at": 6})
    assert (found.is_from_peer, found.fetched_bytes) == (True, SLOT_BYTES)
    assert weights(found) == [6.0] * 3


def test_what_is_kept_here_for_the_node_before_counts_as_the_neighbours(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    keep(memory, "snapshot_neighbour_0_1", 8)
    found, _ = newest(memory, alone, other)
    assert found is not None and (found.is_from_peer, found.fetched_bytes) == (True, 0)


def test_an_own_slot_that_is_damaged_is_fetched_from_the_neighbour(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    other.hold((6, 0, 1))
    keep(memory, "snapshot_0_0", 6)
    memory.flip_a_bit("snapshot_0_0")
    found, refused = newest(memory, alone, other)
    assert found is not None and (found.snapshot_id.step, refused) == (6, ())
    assert found.fetched_bytes and weights(found) == [6.0] * 3


def test_another_layout_reads_the_parts_of_all_ranks_wherever_they_are(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    other.hold((6, 0, 3), (6, 2, 3), (7, 0, 3))  # of step 7 two ranks are nowhere
    keep(memory, "snapshot_0_0", 6, rank=1, world_size=3)
    found, refused = newest(memory, alone, other)
    assert found is not None and (found.snapshot_id.step, refused) == (6, ())
    assert found.fetched_bytes == 2 * SLOT_BYTES
    assert weights(found, 9) == [6.0] * 3 + [7.0] * 3 + [8.0] * 3


def test_parts_of_all_ranks_that_have_no_room_here_are_no_snapshot(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other.hold((6, 0, 2), (6, 1, 2))
    monkeypatch.setattr(
        "shardyard.checkpoint.snapshots.load.free_memory_bytes", lambda _device: 3 * SLOT_BYTES
    )
    assert newest(memory, alone, other) == (None, ())


def test_an_agent_that_is_gone_is_told_and_the_one_before_is_taken(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    other.hold((6, 0, 1))
    keep(memory, "snapshot_0_0", 4)
    (memory.folder / ELSEWHERE).write_bytes(other.told())
    other.server.close()
    found, (refused,) = newest(memory, alone, other)
    assert found is not None and found.snapshot_id.step == 4
    assert refused.step == 6
    assert refused.reason.startswith("what rank 0 held cannot be had from 127.0.0.1 (")


def test_another_snapshot_than_the_one_that_was_named_is_not_taken(
    memory: FolderMemory, alone: dist.ProcessGroup, other: OtherNode
) -> None:
    other.hold((6, 0, 1))
    told = other.told()
    other.hold((9, 0, 1))  # meanwhile
    (memory.folder / ELSEWHERE).write_bytes(told)
    found, (refused,) = latest_snapshot(
        memory, local_ranks=1, group=alone, rank=0, world_size=1, timeout_s=60.0
    )
    assert found is None and "this node has no snapshot of rank 0 and step 6" in refused.reason
