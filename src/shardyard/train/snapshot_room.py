"""Check that the nodes have room for snapshots that no setting asks for.

The nodes of an elastic run take snapshots by default. Where one of them has no room, all
train without, and continue from checkpoints.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.snapshots.slot_writer import SlotLayout
from shardyard.checkpoint.staging_protocol import MemoryProvider
from shardyard.config.formulas import SLOTS_FOR_NEIGHBOUR, peer_labels, slot_labels
from shardyard.config.schema.recipe import Recipe
from shardyard.control_groups import machine_memory_bytes, memory_limit
from shardyard.rundir.jsonl import EventWriter
from shardyard.units import format_bytes

_MEMINFO = Path("/proc/meminfo")


def cannot_hold_snapshots(
    tensors: Mapping[str, Tensor],
    recipe: Recipe,
    memory: MemoryProvider,
    events: EventWriter | None,
    *,
    local_rank: int,
    group: dist.ProcessGroup,
) -> bool:
    """Whether a node cannot hold snapshots that no setting asks for; an event says why.

    All ranks call it.
    """
    assert isinstance(recipe.cluster.devices, int)
    why = snapshot_memory_error(
        tensors,
        memory,
        local_rank=local_rank,
        ranks_of_node=recipe.cluster.devices,
        keeps_peer_snapshots=recipe.elastic.snapshot_neighbour is True,
        group=group,
    )
    if why and events is not None:
        events.write("snapshots_left_out", reason=why)
    return bool(why)


def snapshot_memory_error(
    tensors: Mapping[str, Tensor],
    memory: MemoryProvider,
    *,
    local_rank: int,
    ranks_of_node: int,
    keeps_peer_snapshots: bool,
    group: dist.ProcessGroup,
) -> str:
    """Why snapshots of these tensors have no room on some node; empty: they have on all.

    All ranks call it and get the same answer.

    Args:
        keeps_peer_snapshots: Each node also keeps the snapshots of the node before.
        group: A gloo group of all ranks.
    """
    by_rank: list[Any] = [""] * dist.get_world_size(group)
    why = _local_memory_error(
        tensors, memory, local_rank, ranks_of_node, keeps_peer_snapshots=keeps_peer_snapshots
    )
    dist.all_gather_object(by_rank, why, group=group)
    return next(filter(None, by_rank), "")


def _local_memory_error(
    tensors: Mapping[str, Tensor],
    memory: MemoryProvider,
    local_rank: int,
    ranks_of_node: int,
    *,
    keeps_peer_snapshots: bool,
) -> str:
    labels = slot_labels(local_rank)
    if memory(labels[0], mmap.PAGESIZE) is None:
        return "no process outlives this one and could hold them (that needs Linux)"
    if keeps_peer_snapshots:
        labels += peer_labels(local_rank)[:SLOTS_FOR_NEIGHBOUR]
    slot_bytes = SlotLayout(tensors).slot_bytes
    missing_bytes = sum(max(0, slot_bytes - _size_bytes(memory, label)) for label in labels)
    free_bytes = available_bytes()
    # All ranks of the node take their slots at the same time, from the same memory.
    if missing_bytes * ranks_of_node <= free_bytes:
        return ""
    return (
        f"a node needs {format_bytes(missing_bytes * ranks_of_node)} more host memory for them and "
        f"has {format_bytes(free_bytes)} free"
    )


def _size_bytes(memory: MemoryProvider, label: str) -> int:
    """Return the bytes that the agent holds already, from before a restart."""
    held = memory(label)
    return 0 if held is None else len(held)


def available_bytes() -> int:
    """Host memory that this node's processes may still take, within the limit of its container."""
    free = machine_memory_bytes()
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        # MemAvailable has in it what the kernel can take back from its caches. MemFree has not.
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = memory_limit()
    used = None if limit is None else limit.used_bytes
    return free if limit is None or used is None else min(free, max(0, limit.bytes - used))
