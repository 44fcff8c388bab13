"""Snapshots: what a slot holds at each moment, which slot is written, which snapshot is taken."""

import json
import math
import mmap
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.load import (
    RejectedSnapshot,
    RestorableSnapshot,
    latest_snapshot,
)
from shardyard.checkpoint.snapshots.protocol import ReplicationState
from shardyard.checkpoint.snapshots.slot import (
    HEAD_BYTES,
    SlotHeader,
    SnapshotId,
    checksum,
    empty,
    read_slot,
    write_head,
)
from shardyard.checkpoint.snapshots.slot_writer import Slot, SlotLayout
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.config.formulas import slot_labels
from shardyard.errors import CheckpointError, RequestError, StorageError
from shardyard.train.hooks import no_memory
from tests.checkpoint.conftest import Play
from tests.checkpoint.kept_memory import FolderMemory


@pytest.fixture
def memory(tmp_path: Path) -> FolderMemory:
    (tmp_path / "memory").mkdir()
    return FolderMemory(tmp_path / "memory")


def state(value: float) -> dict[str, Tensor]:
    """Of an odd size, a scalar and an empty tensor among them."""
    return {
        "model.w": torch.full((3, 5), float(value)),
        "model.none": torch.empty(0, 4),
        "optim.step.w": torch.tensor(float(value)),
        "buffer.count": torch.tensor([int(value)] * 7, dtype=torch.uint8),
    }


def slots_of(memory: FolderMemory) -> list[int]:
    """Steps in the slots of the node's first rank; -1: it holds nothing."""
    found = [read_slot(piece) for label in slot_labels(0) if (piece := memory(label)) is not None]
    return sorted(-1 if slot is None else slot.snapshot_id.step for slot in found)


def open_snapshots(
    memory: FolderMemory, *, generation: int = 0, restored: SnapshotId | None = None
) -> Snapshots:
    return Snapshots(
        state(0), memory, local_rank=0, rank=0, world_size=1, generation=generation, names=4,
        restored=restored, interval=Interval(1),
    )  # fmt: skip


def newest(
    memory: FolderMemory, group: dist.ProcessGroup
) -> tuple[RestorableSnapshot | None, tuple[RejectedSnapshot, ...]]:
    return latest_snapshot(memory, local_ranks=1, group=group, rank=0, world_size=1, timeout_s=60.0)


def test_a_slot_holds_nothing_while_it_is_written_and_all_of_it_once_sealed(
    memory: FolderMemory,
) -> None:
    room = SlotLayout(state(1))
    piece = memory("slot", room.slot_bytes)
    assert piece is not None and read_slot(piece) is None
    slot = Slot(piece, room)
    for name, tensor in state(3).items():
        assert read_slot(piece) is None
        slot.shards[name].copy_(tensor)
    slot.seal(SnapshotId(7, 2), '{"seed": 5}', rank=1, world_size=2, names=4)
    sealed = read_slot(piece)
    assert sealed is not None and not sealed.is_damaged()
    assert (sealed.snapshot_id, sealed.values) == (SnapshotId(step=7, generation=2), {"seed": 5})
    assert all(torch.equal(sealed.shard(name), each) for name, each in state(3).items())
    slot.clear()
    assert read_slot(piece) is None


def test_a_slot_of_which_only_a_part_was_written_holds_nothing() -> None:
    seen: list[bool] = []

    class Watched(mmap.mmap):
        """Memory that a reader looks at after each write."""

        def __setitem__(self, place: int | slice, value: int | bytes) -> None:  # type: ignore[override]
            super().__setitem__(place, value)  # type: ignore[index,assignment]
            seen.append(SlotHeader.from_bytes(self[:HEAD_BYTES]) is not None)

    memory = Watched(-1, mmap.PAGESIZE)
    write_head(memory, SlotHeader(2, 64, 64, 0), b"{}")
    empty(memory)
    del seen[:]
    write_head(
        memory, SlotHeader(9, 128, 64, 0), b'{"at": 2}'
    )  # lengths of the slot before are there
    assert seen == [False] * (len(seen) - 1) + [True]


def test_a_new_generation_waits_for_copies_of_its_own() -> None:
    sent = ReplicationState(mmap.mmap(-1, ReplicationState.bytes_for(2)))
    sent.begin()
    sent.set_has_peer(True)
    sent.note(1, 50)
    assert not sent.is_awaited(1, 40)
    sent.begin()  # step 40 comes again
    sent.set_has_peer(True)
    assert sent.is_awaited(1, 40)


def test_a_flipped_bit_of_a_tensor_is_found_and_one_of_the_text_hides_the_slot(
    memory: FolderMemory,
) -> None:
    room = SlotLayout(state(1))
    piece = memory("slot", room.slot_bytes)
    assert piece is not None
    Slot(piece, room).seal(SnapshotId(7, 0), "{}", rank=0, world_size=1, names=4)
    memory.flip_a_bit("slot")
    sealed = read_slot(piece)
    assert sealed is not None and sealed.is_damaged()
    piece[60] ^= 1
    assert read_slot(piece) is None


def test_the_checksum_sees_every_word_and_where_long_parts_lie() -> None:
    words = torch.arange(2**17 + 3)
    before = checksum(words.view(torch.uint8))
    for place in (0, 2**16, 2**17 + 2):
        changed = words.clone()
        changed[place] += 1
        assert checksum(changed.view(torch.uint8)) != before
    swapped = torch.cat([words[2**16 : 2**17], words[: 2**16], words[2**17 :]])
    assert checksum(swapped.view(torch.uint8)) != before


def test_what_is_no_tensor_and_has_no_room_is_refused(memory: FolderMemory) -> None:
    room = SlotLayout(state(1))
    piece = memory("slot", room.slot_bytes)
    assert piece is not None
    with pytest.raises(
        CheckpointError, match=r"has 2.0 MiB of them. Set elastic.snapshot_every=null"
    ):
        Slot(piece, room).seal(SnapshotId(1, 0), f'"{"x" * 2**21}"', rank=0, world_size=1, names=4)


def test_the_newest_snapshot_and_what_a_save_reads_are_left_alone(memory: FolderMemory) -> None:
    snapshots = open_snapshots(memory)
    held = snapshots.take_for_save(10, state(10), "{}")
    for step in (20, 30, 40):
        snapshots.take(step, state(step), {})
        assert torch.equal(held["model.w"], state(10)["model.w"])
    snapshots.take_for_save(50, state(50), "{}")  # the save before is over: its slot is the oldest
    snapshots.close()
    assert slots_of(memory) == [30, 40, 50]


def test_a_state_that_is_not_finite_costs_the_newest_snapshot_nothing(
    memory: FolderMemory,
) -> None:
    snapshots = open_snapshots(memory)
    snapshots.take_for_save(1, state(1), "{}")  # the save goes on: two slots are left
    snapshots.take(2, state(2), {})
    for step in (3, 4):
        snapshots.take(step, {**state(step), "model.w": torch.full((3, 5), math.inf)}, {})
    snapshots.close()
    assert slots_of(memory) == [-1, 1, 2]


def test_the_newest_snapshot_is_the_one_taken_last_whatever_its_step(memory: FolderMemory) -> None:
    snapshots = open_snapshots(memory)
    snapshots.take_for_save(10, state(10), "{}")
    for step in (30, 20, 21):
        snapshots.take(step, state(step), {})
    snapshots.close()
    assert slots_of(memory) == [10, 20, 21]


def test_a_state_that_is_not_finite_is_no_snapshot(
    memory: FolderMemory, alone: dist.ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = open_snapshots(memory)
    snapshots.take(1, state(1), {})
    snapshots.take(2, state(2) | {"model.w": torch.full((3, 5), math.nan)}, {})
    snapshots.close()
    found, refused = newest(memory, alone)
    assert found is not None and (found.snapshot_id.step, refused) == (1, ())
    assert "no snapshot of step 2: model.w holds NaN" in capsys.readouterr().err


def test_a_damaged_snapshot_is_refused_and_the_one_before_is_taken(
    memory: FolderMemory, alone: dist.ProcessGroup
) -> None:
    snapshots = open_snapshots(memory)
    for step in (1, 2, 3):
        snapshots.take(step, state(step), {"at": step})
    snapshots.close()
    newest_label = max(slot_labels(0), key=lambda label: read_slot(memory(label)).snapshot_id)  # type: ignore[arg-type,union-attr]
    memory.flip_a_bit(newest_label)
    found, refused = newest(memory, alone)
    assert found is not None and (found.snapshot_id, found.values) == (SnapshotId(2, 0), {"at": 2})
    assert refused == (RejectedSnapshot(3, "what rank 0 held differs from its checksum"),)
    wanted = state(2)
    filled = {name: torch.zeros_like(each) for name, each in wanted.items()}
    found.fill(filled, of_others=(), allow_extra=False)
    assert all(torch.equal(filled[name], each) for name, each in wanted.items())


def test_steps_that_nobody_goes_on_from_are_forgotten(
    memory: FolderMemory, alone: dist.ProcessGroup
) -> None:
    snapshots = open_snapshots(memory)
    for step in (1, 2, 3):
        snapshots.take(step, state(step), {})
    snapshots.close()
    again = open_snapshots(memory, generation=1, restored=SnapshotId(2, 0))
    again.take(3, state(33), {})
    again.close()
    assert slots_of(memory) == [1, 2, 3]
    found, _ = newest(memory, alone)
    assert found is not None and found.snapshot_id == SnapshotId(step=3, generation=1)
    open_snapshots(memory, generation=2, restored=None).close()  # from a checkpoint instead
    assert slots_of(memory) == [-1, -1, -1]


def test_without_an_agent_snapshots_are_refused() -> None:
    with pytest.raises(RequestError, match=r"that needs Linux, .* Set elastic.snapshot_every=null"):
        Snapshots(
            state(0), no_memory, local_rank=0, rank=0, world_size=1, generation=0, names=4,
            restored=None, interval=Interval(1),
        )  # fmt: skip


def test_too_little_memory_says_how_much_is_needed(memory: FolderMemory) -> None:
    def refuse(label: str, size_bytes: int | None = None, /) -> object:
        if size_bytes is not None and size_bytes > 2**16:
            raise OSError(28, os.strerror(28))
        return memory(label, size_bytes)

    snapshots = Snapshots(
        state(0), refuse, local_rank=0, rank=0, world_size=1, generation=0, names=4,  # type: ignore[arg-type]
        restored=None, interval=Interval(1),
    )  # fmt: skip
    with pytest.raises(
        StorageError, match=r"needs 3 x 1.0 MiB of host memory for each rank, .*null"
    ):
        snapshots.take(1, state(1), {})
    snapshots.close()


@pytest.mark.heavy
def test_two_ranks_find_one_snapshot_and_one_rank_reads_both_parts(
    memory: FolderMemory, play: Play, tmp_path: Path
) -> None:
    assert memory.folder == tmp_path / "memory"
    play("take_snapshots", tmp_path, world_size=2)
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert told == [{"newest": 4, "of_one": True, "alone": None}] * 2


@pytest.mark.slow
def test_a_worker_killed_at_any_moment_leaves_a_whole_snapshot(
    memory: FolderMemory, play: Play, tmp_path: Path
) -> None:
    assert memory.folder.is_dir()
    play("snapshot_until_killed", tmp_path, "60", world_size=1)
    kills = [json.loads(line) for line in (tmp_path / "kills.jsonl").read_text().splitlines()]
    assert len(kills) == 60
    assert all(each["is_of_one_step"] and not each["refused"] for each in kills)
    assert all(each["lost"] <= 2 for each in kills)
    assert sum(each["cut_off"] for each in kills) >= 10, "too few fell into a copy to say anything"
