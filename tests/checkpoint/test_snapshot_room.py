"""Snapshots that no setting asks for are taken only where every node has room for them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardyard.checkpoint.staging_protocol import MemoryProvider
from shardyard.control_groups import machine_memory_bytes
from shardyard.train import snapshot_room
from shardyard.train.hooks import no_memory
from shardyard.train.snapshot_room import available_bytes, snapshot_memory_error
from tests.checkpoint.kept_memory import FolderMemory

TENSORS = {"weight": torch.zeros(2**18)}
"""1 MiB; the slot has 1 MiB of room for what is no tensor."""


def _lacking(memory: MemoryProvider, group: dist.ProcessGroup, *, neighbour: bool = True) -> str:
    return snapshot_memory_error(
        TENSORS, memory, local_rank=0, ranks_of_node=4, keeps_peer_snapshots=neighbour, group=group
    )


def test_three_copies_of_each_rank_and_two_of_the_node_before_need_room(
    alone: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, mib = FolderMemory(tmp_path), 2**20
    monkeypatch.setattr(snapshot_room, "available_bytes", lambda: 30 * mib)
    why = _lacking(memory, alone)
    assert why.endswith("and has 30.0 MiB free") and "a node needs 40" in why
    assert not _lacking(memory, alone, neighbour=False)
    # what the agent holds since before a restart is not needed again
    for label in ("snapshot_0_0", "snapshot_0_1", "snapshot_0_2"):
        memory(label, 3 * mib)
    assert not _lacking(memory, alone)


def test_without_an_agent_there_are_none(alone: dist.ProcessGroup) -> None:
    assert "no process outlives this one" in _lacking(no_memory, alone)


def test_free_memory_is_that_of_the_kernel_within_the_limit() -> None:
    assert 0 < available_bytes() <= machine_memory_bytes()
