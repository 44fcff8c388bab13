"""Where one rank trains without sharding, in a copy of its weights: one rule for all who ask.

The training half does it (``parallel/compute_copies.py``), the planner predicts it.
"""

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe

TRIED_ON = ("cpu",)
"""Kinds of devices on which it has run. On others it waits for its measurement
(``benchmarks/gpu``, variants ``copies``): what never ran there is nobody's default."""


def holds_compute_copies(recipe: Recipe, layout: Layout, *, anywhere: bool = False) -> bool:
    """Whether a resolved recipe is trained so; a model must also be one that can be.

    Everything else is sharded over its one rank as it would be over more: fp16, fp8 with a scale a
    row (both products of a weight then want other numbers), gradients that are summed in another
    format than fp32, adapters, frozen weights, and what is moved to the host.

    Args:
        anywhere: Also on devices on which it has not run: to try it.
    """
    return layout.world_size == 1 and allows_compute_copies(recipe, anywhere=anywhere)


def allows_compute_copies(recipe: Recipe, *, anywhere: bool = False) -> bool:
    """The same of a recipe, whatever its layout."""
    precision, model = recipe.precision, recipe.model
    return (
        (anywhere or recipe.cluster.device in TRIED_ON)
        and (
            precision.compute == "bf16"
            or (precision.compute == "fp8" and precision.fp8_scaling == "tensorwise")
        )
        and precision.reduce == "fp32"
        and recipe.memory.offload == "none"
        and model.lora.rank is None
        and not model.frozen
    )
