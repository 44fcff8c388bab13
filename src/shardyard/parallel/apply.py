"""The one order in which a model is changed into its parallel form."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardyard.config.legality import Layout
from shardyard.config.schema import Recipe
from shardyard.models.dropout import SampleKeys, add_dropout
from shardyard.models.families import Family, blocks_of, dropout_places
from shardyard.parallel.data import shard_data_parallel
from shardyard.parallel.precision import mixed_precision
from shardyard.parallel.recompute import apply_recompute


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    recipe: Recipe,
    family: Family,
    layout: Layout,
    keys: SampleKeys,
) -> None:
    """Change a model on the meta device, in place, as a resolved recipe says."""
    blocks = blocks_of(model, family)
    # 1. dropout first: its hooks must see a module's output before FSDP's hooks let go of it
    if recipe.model.dropout:
        places = dropout_places(model, family)
        add_dropout(places, drop=recipe.model.dropout, seed=recipe.run.seed, keys=keys)
    # 2. recompute inside compile: the compiler then sees, and may fuse, what is made again
    apply_recompute(blocks, recipe.memory.recompute)
    # 3. compile inside sharding: one small graph a block; gathers stay outside of it
    if recipe.model.compile:
        for block in blocks.values():
            block.compile()
    # 4. shard last: groups are formed from the parameters as they now are
    shard_data_parallel(
        model,
        mesh,
        family=family,
        layout=layout,
        precision=mixed_precision(recipe.precision),
        prefetch=recipe.parallel.prefetch,
    )
