"""Whether the nodes have room for snapshots that no setting asks for.

The nodes of an elastic run take snapshots by default. Where one of them has no room, all train
without, and go on from checkpoints.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.snapshots.slot import Room
from shardyard.checkpoint.staging import Memory
from shardyard.config.formulas import SLOTS_FOR_NEIGHBOUR, neighbour_labels, slot_labels
from shardyard.config.schema.recipe import Recipe
from shardyard.memory_limit import machine_memory_bytes, memory_limit
from shardyard.rundir.jsonl import EventWriter
from shardyard.units import format_bytes

_MEMINFO = Path("/proc/meminfo")


def have_no_room(
    tensors: Mapping[str, Tensor],
    recipe: Recipe,
    memory: Memory,
    events: EventWriter | None,
    *,
    local_rank: int,
    group: dist.ProcessGroup,
) -> bool:
    """Whether a node cannot hold snapshots that no setting asks for; an event says why.

    All ranks call it.
    """
    assert isinstance(recipe.cluster.devices, int)
    why = lacking_room(
        tensors,
        memory,
        local_rank=local_rank,
        ranks_of_node=recipe.cluster.devices,
        neighbour=recipe.elastic.snapshot_neighbour is True,
        group=group,
    )
    if why and events is not None:
        events.write("snapshots_left_out", reason=why)
    return bool(why)


def lacking_room(
    tensors: Mapping[str, Tensor],
    memory: Memory,
    *,
    local_rank: int,
    ranks_of_node: int,
    neighbour: bool,
    group: dist.ProcessGroup,
) -> str:
    """Why snapshots of these tensors have no room on some node; empty: they have on all.

    All ranks call it and get the same answer.

    Args:
        neighbour: Each node also keeps the snapshots of the node before.
        group: A gloo group of all ranks.
    """
    found: list[Any] = [""] * dist.get_world_size(group)
    why = _lacking_here(tensors, memory, local_rank, ranks_of_node, neighbour=neighbour)
    dist.all_gather_object(found, why, group=group)
    return next(filter(None, found), "")


def _lacking_here(
    tensors: Mapping[str, Tensor],
    memory: Memory,
    local_rank: int,
    ranks_of_node: int,
    *,
    neighbour: bool,
) -> str:
    labels = slot_labels(local_rank)
    if memory(labels[0], mmap.PAGESIZE) is None:
        return "no process outlives this one and could hold them (that needs Linux)"
    if neighbour:
        labels += neighbour_labels(local_rank)[:SLOTS_FOR_NEIGHBOUR]
    slot_bytes = Room(tensors).slot_bytes
    missing_bytes = sum(max(0, slot_bytes - _size_bytes(memory, label)) for label in labels)
    free_bytes = available_bytes()
    if missing_bytes * ranks_of_node <= free_bytes:
        return ""
    return (
        f"a node needs {format_bytes(missing_bytes * ranks_of_node)} more host memory for them and "
        f"has {format_bytes(free_bytes)} free"
    )


def _size_bytes(memory: Memory, label: str) -> int:
    """What the agent holds already, from before a restart."""
    held = memory(label)
    return 0 if held is None else len(held)


def available_bytes() -> int:
    """Host memory that this node's processes may still take, within the limit of its container."""
    free = machine_memory_bytes()
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = memory_limit()
    used = None if limit is None else limit.used_bytes
    return free if limit is None or used is None else min(free, max(0, limit.bytes - used))
