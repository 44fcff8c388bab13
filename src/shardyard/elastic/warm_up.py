"""Steps of a small model, for all that is slow the first time in a process.

They go the way of a real step (sharding, optimizer, the compiler where the recipe has one), so
that nobody has to know what that imports, starts and looks up. The group that they are taken in
has one rank that exists and sends nothing.

Where the recipe compiles, the model is one block of the run's own, if that is small. The compiler
keeps what it made of a block's code in this process and compares sizes, formats and settings
only, so the run's blocks, which are other objects, need not be compiled again.
"""

import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardyard import torch_private
from shardyard.config.layout import Layout
from shardyard.config.resolved import Resolved
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Memory, Model, Optim, Precision, Recipe
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.models.build import fill_weights
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.base import task_class
from shardyard.train.build import build_optimizer, build_sharded
from shardyard.train.step import Stepper

_RANK = 65_536
"""Higher than any run's. Torch remembers operators by the ranks of their mesh and the names of its
axes, and would find this group, which is gone by then, for a run's."""

_MOST_PARAMETERS = 2**24
"""Most parameters of a block of the run's own.

With gradients and AdamW's averages they take 256 MiB, for a moment.
"""
_VOCAB = 64
"""Blocks do not know the vocabulary."""


def warm_up(of: Resolved, device: torch.device) -> None:
    """Take steps as this run does, but small; only a warm process is left of them.

    Random numbers that come later are those that would have come without it.
    """
    dist.init_process_group(
        "fake", store=torch_private.fake_store(), rank=_RANK, world_size=_RANK + 1
    )
    try:
        with torch.random.fork_rng(devices=[]):
            recipe, shape = _own_block(of, device) or _tiny(of.recipe)
            _take_steps(recipe, shape, device, shards=of.recipe.parallel.dp_shard != 1)
    finally:
        gc.collect()  # the model must be gone before the process group is
        dist.destroy_process_group()


def _own_block(of: Resolved, device: torch.device) -> tuple[Recipe, ModelShape] | None:
    """Return one block of the run's model; None: it is not compiled, or is split over processes.

    On a device there is no room for it next to the process that trains.
    """
    recipe, degrees = of.recipe, of.recipe.parallel
    is_split = any(each != 1 for each in (degrees.tp, degrees.cp, degrees.pp, degrees.ep))
    if of.shape is None or not recipe.model.compile or device.type != "cpu" or is_split:
        return None
    if of.shape.block_parameters > _MOST_PARAMETERS or recipe.memory.offload != "none":
        return None
    if recipe.optim.module is not None:  # the user's code is called in the run only
        return None
    return recipe, replace(of.shape, num_hidden_layers=1, vocab_size=_VOCAB)


def _tiny(of: Recipe) -> tuple[Recipe, ModelShape]:
    compute = of.precision.compute if of.precision.compute in ("fp32", "bf16") else "fp32"
    recipe = Recipe(
        model=Model(preset="llama-tiny", dropout=0.0, compile=of.model.compile),
        data=Data(seq_len=16),
        optim=Optim(lr=1e-3, weight_decay=0.1, global_batch=2, micro_batch=1),
        precision=Precision(compute=compute, output=compute),
        memory=Memory(loss_chunk="none"),
    )
    return recipe, replace(PRESETS["llama-tiny"].shape, vocab_size=_VOCAB)


def _take_steps(recipe: Recipe, shape: ModelShape, device: torch.device, *, shards: bool) -> None:
    # Of two shards the one rank has one, and sends nothing: as in the run, not as replicas go.
    layout = Layout(dp_replicate=1, dp_shard=2 if shards else 1, zero=3)
    ranks = torch.tensor([_RANK]).view(1, 1, 1, 1)
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    dense = DeviceMesh(device.type, ranks, mesh_dim_names=axes)
    mesh = Mesh(layout=layout, dense=dense, experts=None, context=None)
    computation = build_sharded(recipe, shape, mesh, device=device)
    optimizer = build_optimizer(recipe, computation, mesh, device=device)
    fill_weights(computation.model, folder=None, seed=0)
    stepper = Stepper(computation, optimizer, mesh, device=device, grad_clip=1.0)
    batch = task_class(recipe.task.name).empty_batch(recipe)
    stepper.run([batch, batch], lr=1e-3, drain=False).read()
