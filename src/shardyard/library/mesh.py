"""The device mesh of a script: from degrees and torchrun's environment."""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardyard.config.layout import Layout
from shardyard.config.rules.layout import resolve_layout
from shardyard.config.schema.recipe import Parallel
from shardyard.config.validate import recipe_of
from shardyard.errors import RecipeError, RequestError
from shardyard.parallel import mesh as meshes
from shardyard.parallel.device import available_device, process_group_backend, select_device

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build_mesh(
    *,
    dp_replicate: int | Literal["auto"] = "auto",
    dp_shard: int | Literal["auto"] = "auto",
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    zero: Literal[1, 2, 3, "auto"] = "auto",
    device: str = "auto",
) -> meshes.Mesh:
    """Return the mesh of all processes. Every process calls it; it joins them if needed.

    The axes and ``zero`` mean what they mean in a recipe (docs/settings.md, ``parallel``).

    Args:
        device: Kind of device that computes; auto: this machine's accelerator, or cpu.

    Raises:
        RecipeError: The degrees are no layout of these processes.
        RequestError: The process was started in a way that does not say who the others are.
    """
    degrees = {
        "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "pp": pp, "ep": ep,
        "zero": zero,
    }  # fmt: skip
    world_size = _world_size()
    try:
        layout, _ = resolve_layout(
            _checked(degrees), world_size=world_size, devices_per_node=devices_per_node(world_size)
        )
    except RecipeError as error:
        alone = (
            "This process was started by itself. Start several of them: torchrun --nproc-per-node "
            "N your_script.py"
        )
        hint = alone if world_size == 1 else ""
        raise RecipeError(error.problems, "build_mesh()", hint=hint) from None
    kind = available_device() if device == "auto" else device
    chosen = local_device(kind)
    if not dist.is_initialized():
        _join(process_group_backend(kind), world_size)
    return _cached_mesh(layout, chosen.type)


@dataclass
class _MeshCache:
    """Meshes by layout and kind of device: each has process groups, and they their threads."""

    world: Any = None
    """The process group that they are parts of."""
    by_layout: dict[tuple[Layout, str], meshes.Mesh] = field(default_factory=dict)


_made = _MeshCache()


def _cached_mesh(layout: Layout, kind: str) -> meshes.Mesh:
    if _made.world is not dist.group.WORLD:
        _made.world, _made.by_layout = dist.group.WORLD, {}
    if (layout, kind) not in _made.by_layout:
        _made.by_layout[layout, kind] = meshes.build_mesh(layout, kind)
    return _made.by_layout[layout, kind]


def local_device(kind: str) -> torch.device:
    """This process's own device of a kind."""
    return select_device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def devices_per_node(world_size: int) -> int:
    """Processes of one node, as torchrun says; without it all are on this one.

    Where nodes have unequally many: as many as are on every one.
    """
    return math.gcd(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))


def _checked(degrees: dict[str, Any]) -> Parallel:
    return recipe_of({"parallel": degrees}).parallel


def _world_size() -> int:
    """From the process group, else from the environment, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    given = [name for name in _RENDEZVOUS if name in os.environ]
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if given and missing:
        raise RequestError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}, so this process "
            "cannot find the others. Start with torchrun, which sets all of them; or unset "
            f"{', '.join(given)} to run in one process."
        )
    return int(os.environ["WORLD_SIZE"]) if given else 1


def _join(backend: str, world_size: int) -> None:
    if all(name in os.environ for name in _RENDEZVOUS):
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
