"""What is slow the first time in a process, done before it is needed: steps of a tiny model.

They go the way of a real step (sharding, optimizer, the compiler where the recipe has one), so that
nobody has to know what that imports, starts and looks up. The group that they are taken in has one
rank that exists and sends nothing.
"""

import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardyard import torch_private
from shardyard.config.data_section import Data
from shardyard.config.layout import Layout
from shardyard.config.schema import Memory, Model, Optim, Precision, Recipe
from shardyard.families.presets import PRESETS
from shardyard.models.build import fill_weights
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.named import task_class
from shardyard.train.setup import build_optimizer, build_sharded
from shardyard.train.step import Stepper

_RANK = 65_536
"""Higher than any run's. Torch remembers operators by the ranks of their mesh and the names of its
axes, and would find this group, which is gone by then, for a run's."""


def warm_up(of: Recipe, device: torch.device) -> None:
    """Take steps as a run of this recipe does, but tiny; only a warm process is left of them.

    Random numbers that come later are those that would have come without it.
    """
    dist.init_process_group(
        "fake", store=torch_private.fake_store(), rank=_RANK, world_size=_RANK + 1
    )
    try:
        with torch.random.fork_rng(devices=[]):
            _take_steps(_tiny(of), device)
    finally:
        gc.collect()  # the model must be gone before the process group is
        dist.destroy_process_group()


def _tiny(of: Recipe) -> Recipe:
    compute = of.precision.compute if of.precision.compute in ("fp32", "bf16") else "fp32"
    return Recipe(
        model=Model(preset="llama-tiny", dropout=0.0, compile=of.model.compile),
        data=Data(seq_len=16),
        optim=Optim(lr=1e-3, weight_decay=0.1, global_batch=2, micro_batch=1),
        precision=Precision(compute=compute, output=compute),
        memory=Memory(loss_chunk="none"),
    )


def _take_steps(recipe: Recipe, device: torch.device) -> None:
    shape = replace(PRESETS["llama-tiny"].shape, vocab_size=64)
    layout = Layout(dp_replicate=1, dp_shard=1, zero=3)
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
