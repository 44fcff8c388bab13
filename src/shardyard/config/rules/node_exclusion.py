"""Check whether nodes can be excluded for the verdicts of ``elastic.leave_out_for``."""

from collections.abc import Iterable
from contextlib import suppress

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RecipeError, RequestError

_SETTING = "elastic.leave_out_for"
_OF_RANKS = "slow_rank"
"""The verdict that comes of steps."""
_OF_AGENTS = "slow_network"
"""The verdict that agents come to themselves; all others come of telemetry."""
_OF_PROCESSORS = "throttled"
"""The one of them that is not of a device."""


def check_node_exclusion(recipe: Recipe) -> Iterable[Problem]:
    """Why no node can be left out, as far as the recipe says so."""
    rules = recipe.elastic.leave_out_for
    if not rules:
        return
    elastic, nodes = recipe.elastic, recipe.cluster.nodes
    fewest = nodes if elastic.min_nodes == "auto" else elastic.min_nodes
    most = nodes if elastic.max_nodes == "auto" else elastic.max_nodes
    if fewest >= most:
        text = (
            f"={_format_list(rules)} continues with one node less, but elastic.min_nodes={fewest} "
            f"needs all of the {most} that there may be. Set elastic.min_nodes below, or leave it "
            "empty."
        )
        yield Problem(_SETTING, text)
    of_telemetry = [rule for rule in rules if rule not in (_OF_RANKS, _OF_AGENTS)]
    if of_telemetry and recipe.observe.telemetry_every_s is None:
        text = (
            f"={_format_list(of_telemetry)} follows from what telemetry finds, and "
            "observe.telemetry_every_s=null writes none. Give it seconds, or leave these out."
        )
        yield Problem(_SETTING, text)
    yield from check_exclusion_device(recipe)


def check_exclusion_device(recipe: Recipe) -> Iterable[Problem]:
    """The same, of what the devices do not tell; asked again once the device is known."""
    device, rules = recipe.cluster.device, recipe.elastic.leave_out_for
    if device == "auto":
        with suppress(RecipeError, RequestError):  # told where machines are checked
            chosen = chosen_cluster(recipe.cluster)
            device = device if chosen is None else chosen.accelerator.device
    if device == "auto":
        return
    if _OF_RANKS in rules and device != "cpu":
        text = (
            f"={_format_list([_OF_RANKS])} with cluster.device={device}: there a collective "
            "returns once "
            "it is queued, so the ranks' times do not tell who is slow, and no rank would ever be "
            f"left out. Leave {_OF_RANKS} out."
        )
        yield Problem(_SETTING, text)
    others = (_OF_RANKS, _OF_AGENTS, _OF_PROCESSORS)
    of_devices = [rule for rule in rules if rule not in others]
    if of_devices and device == "cpu":
        text = (
            f"={_format_list(of_devices)} with cluster.device=cpu: processors have no counters of "
            "devices, so these are never found. Leave them out."
        )
        yield Problem(_SETTING, text)


def _format_list(rules: Iterable[str]) -> str:
    return f"[{', '.join(rules)}]"
