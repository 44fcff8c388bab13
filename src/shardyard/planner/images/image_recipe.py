"""From a recipe for images to the step that is planned, and what of it is not counted."""

from collections.abc import Iterable
from dataclasses import replace

from shardyard.config.batch import step_samples
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.config.snapshots import copies
from shardyard.errors import Problem
from shardyard.families.images.lookup import operators_of
from shardyard.families.images.network import ImageNetwork
from shardyard.hardware.cluster import Cluster
from shardyard.planner.images.decoding import decoded_per_s
from shardyard.planner.images.image_step import ImageStep
from shardyard.planner.workload import Techniques, formats_of


def image_step_of(
    recipe: Recipe, network: ImageNetwork, layout: Layout, cluster: Cluster | None
) -> ImageStep:
    """The step of a recipe without any ``auto``, as the training half carries it out.

    Args:
        cluster: Its cores decode; None: not known, so that decoding is never waited for.
    """
    micro_batch, size = recipe.optim.micro_batch, recipe.data.images.size
    asked = recipe.data.images.threads
    threads = None if asked == "auto" else asked
    offload, recompute = recipe.memory.offload, recipe.memory.recompute
    assert isinstance(micro_batch, int) and isinstance(size, int)
    assert offload in ("none", "optimizer"), "the recipe's check refuses the others"
    return ImageStep(
        operators=operators_of(replace(network, size=size)),
        size=size,
        layout=layout,
        micro_batch=micro_batch,
        global_batch=step_samples(recipe.optim, devices=layout.world_size),
        batch_per_device=recipe.optim.batch_per_device,
        formats=formats_of(recipe),
        recompute="full" if recompute == "full" else "none",
        counted_as_kept="" if recompute in ("none", "full") else f"{recompute}",
        sums_norms=recipe.model.batch_norm == "step",
        techniques=Techniques(
            kernels="eager",
            prefetch=recipe.parallel.prefetch,
            offload=offload,
            updates_on_host=False,
            snapshots=copies(recipe),
            parks=recipe.elastic.parked is True,
        ),
        threads=threads,
        decoded_per_s=None if cluster is None else decoded_per_s(cluster, threads),
    )


def uncounted(recipe: Recipe) -> Iterable[Problem]:
    """What a recipe for images asks and no plan counts; such a run starts all the same."""
    recompute = recipe.memory.recompute
    if recompute not in ("none", "full"):
        text = f"={recompute!r} of a network for images is in no plan yet. Use none or full."
        yield Problem("memory.recompute", text)
    if recipe.model.compile is True:
        text = "=true: what a compiler makes of convolutions is in no plan yet. Use false."
        yield Problem("model.compile", text)
