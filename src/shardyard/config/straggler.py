"""Where a recipe asks for stragglers to be left out and nothing could do so."""

from collections.abc import Iterable
from contextlib import suppress

from shardyard.config.machines import chosen_cluster
from shardyard.config.schema import Recipe
from shardyard.errors import Problem, RecipeError, RequestError

_SETTING = "elastic.straggler"


def straggler_problems(recipe: Recipe) -> Iterable[Problem]:
    """Why no node can be left out, as far as the recipe says so."""
    if recipe.elastic.straggler == "report":
        return
    elastic, nodes = recipe.elastic, recipe.cluster.nodes
    fewest = nodes if elastic.min_nodes == "auto" else elastic.min_nodes
    most = nodes if elastic.max_nodes == "auto" else elastic.max_nodes
    if fewest >= most:
        text = (
            f"=leave_out goes on with a node less, and elastic.min_nodes={fewest} needs all of the "
            f"{most} that there may be. Set elastic.min_nodes below, or leave it at report."
        )
        yield Problem(_SETTING, text)
    yield from device_problems(recipe)


def device_problems(recipe: Recipe) -> Iterable[Problem]:
    """The same, of devices that notes do not compare; asked again once the device is known."""
    device = recipe.cluster.device
    if device == "auto":
        with suppress(RecipeError, RequestError):  # told where machines are checked
            chosen = chosen_cluster(recipe.cluster)
            device = device if chosen is None else chosen.accelerator.device
    if recipe.elastic.straggler != "report" and device not in ("auto", "cpu"):
        text = (
            f"=leave_out with cluster.device={device}: there a collective returns once it is "
            "queued, so the ranks' times do not tell who is slow, and no rank would ever be left "
            "out. Leave it at report."
        )
        yield Problem(_SETTING, text)
