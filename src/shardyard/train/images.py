"""A network that classifies images: built on every rank, sharded over the axes of data."""

from pathlib import Path

import torch
import torch.distributed as dist

from shardyard.config.resolved import Resolved
from shardyard.config.rules.images import check_step_batch, folder_head
from shardyard.errors import RecipeError
from shardyard.models.build import freeze
from shardyard.models.images import (
    add_image_dropout,
    blocks_of_network,
    build_network,
    fill_network,
    load_network,
    set_batch_norm_momentum,
)
from shardyard.models.random import SampleKeys
from shardyard.parallel.apply import parallelize_custom
from shardyard.parallel.custom_module import check_weights_equal
from shardyard.parallel.low_precision import DTYPES
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.images import ImageComputation


def build_image_network(
    resolved: Resolved, mesh: Mesh, *, device: torch.device, control: dist.ProcessGroup
) -> ImageComputation:
    """Make, fill and shard the network. All ranks call it together.

    Args:
        control: A gloo group of all ranks.

    Raises:
        RequestError: The folder's weights are not those of its config.json.
        RecipeError: A rank cannot compute its samples at once, and model.batch_norm asks for it.
    """
    recipe, network = resolved.recipe, resolved.network
    assert network is not None
    problems = list(check_step_batch(recipe, ranks=mesh.layout.data_ranks))
    if problems:  # nodes may have gone since the recipe was resolved
        raise RecipeError(problems, "the ranks that there are")
    seed, settings = recipe.run.seed, recipe.model
    assert isinstance(settings.dropout, float) and isinstance(recipe.model.drop_path, float)
    model = build_network(network)
    if resolved.model_dir is None:
        fill_network(model, network, seed=seed, zero_last_norm=settings.zero_last_norm)
    else:
        folder = Path(resolved.model_dir)
        head = folder_head(resolved)
        rows = None if head is None else head.rows
        load_network(model, network, folder, seed=seed, rows=rows)
    # Before sharding: a rank sees only its own part afterwards, and no difference would show.
    check_weights_equal(model, control)
    if isinstance(settings.batch_norm_momentum, float):
        set_batch_norm_momentum(model, settings.batch_norm_momentum)
    # On the host, so that frozen weights reach the device in their narrow format.
    freeze(model, settings.frozen, storage_dtype=DTYPES[recipe.precision.compute])
    model.to(device)
    keys = SampleKeys()
    add_image_dropout(
        model,
        network,
        dropout=settings.dropout,
        drop_path=recipe.model.drop_path,
        seed=seed,
        keys=keys,
    )
    blocks = blocks_of_network(model, network)
    norms = parallelize_custom(model, mesh, recipe=recipe, blocks=blocks, words={}, keys=keys)
    return ImageComputation(
        model,
        mesh,
        norms=norms,
        images=recipe.data.images,
        label_smoothing=recipe.task.label_smoothing,
        device=device,
        keys=keys,
    )
