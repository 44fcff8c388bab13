"""Bytes of a checkpoint: what plan, doctor and train compare with the room of run.dir."""

from shardyard.config.schema.recipe import Recipe
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.registry import operators_of
from shardyard.families.shape import ModelShape
from shardyard.planner.trainable_parameters import trained_of
from shardyard.planner.workload import FORMAT_BYTES, optimizer_bytes


def checkpoint_bytes(recipe: Recipe, model: ModelShape | ImageNetwork) -> int:
    """One checkpoint on disk, all ranks: fp32 weights, optimizer states and averages.

    Args:
        recipe: May still hold an ``auto``; frozen weights then count as fp32.
    """
    trained, frozen = trained_and_frozen(recipe, model)
    saved = trained * (4 + optimizer_bytes(recipe))
    if recipe.model.lora.rank is None:  # the base of adapters is in no checkpoint
        compute = recipe.precision.compute
        saved += frozen * (4 if compute == "auto" else FORMAT_BYTES[compute])
    return round(saved)


def trained_and_frozen(recipe: Recipe, model: ModelShape | ImageNetwork) -> tuple[int, int]:
    """Parameters of each kind."""
    if isinstance(model, ImageNetwork):
        return sum(row.parameters for row in operators_of(model)), 0
    trained = trained_of(model, recipe.model)
    if trained is None:
        return model.parameters, 0
    return trained.parameters, model.parameters + trained.added - trained.parameters
