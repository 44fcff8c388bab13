"""A network that classifies images: built on every rank, sharded over the axes of data."""

import torch
import torch.distributed as dist

from shardyard.config.schema import Recipe
from shardyard.families.images.network import ImageNetwork
from shardyard.models.build import freeze
from shardyard.models.images import blocks_of_network, build_network
from shardyard.parallel.apply import parallelize_own
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.own_module import refuse_differing_weights
from shardyard.parallel.precision import DTYPES
from shardyard.tasks.images import ImageComputation


def build_image_network(
    recipe: Recipe,
    network: ImageNetwork,
    mesh: Mesh,
    *,
    device: torch.device,
    control: dist.ProcessGroup,
) -> ImageComputation:
    """Make and shard the network. All ranks call it together.

    Args:
        control: A gloo group of all ranks.
    """
    torch.manual_seed(recipe.run.seed)
    model = build_network(network)
    refuse_differing_weights(model, control)
    freeze(model, recipe.model.frozen, held_in=DTYPES[recipe.precision.compute])
    model.to(device)
    blocks = blocks_of_network(model, network)
    norms = parallelize_own(model, mesh, recipe=recipe, blocks=blocks, words={})
    return ImageComputation(
        model,
        mesh,
        norms=norms,
        images=recipe.data.images,
        label_smoothing=recipe.task.label_smoothing,
        device=device,
    )
