"""Check whether nodes can be excluded for the verdicts of ``elastic.leave_out_for``."""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.schema.recipe import Elastic, Recipe
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
            f"={_format_list(rules)} goes on with a node less, and elastic.min_nodes={fewest} "
            "needs all "
            f"of the {most} that there may be. Set elastic.min_nodes below, or leave it empty."
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


# Which timeout must end before which: an inverted pair is refused, with both values.
#
# Who waits for something must wait longer than whoever finds out what is wrong with it. Else the
# wrong one gives up first, and names the wrong cause or loses the state. What launchers derive by
# themselves is no row: the grace of a pod and of a Batch container is ``elastic.drain_timeout_s``
# and a margin. Nor is ``launch.time_limit`` beside the patience of ranks: a short job never needs
# it.

_HANG_MIN_S = 3.5
_OTHERS_COME_S = 300.0
"""Beyond the patience of ranks: for agents, and at a start for nodes, to come."""


@dataclass(frozen=True)
class TimeoutOrder:
    """One timeout that must be shorter than another; both are settings in seconds."""

    shorter: str
    longer: str
    reason: str
    may_be_equal: bool = False
    on: str | None = None
    """The launcher that reads one of them; None: every run does."""


TIMEOUTS = (
    TimeoutOrder(
        "elastic.keep_alive_s",
        "elastic.collective_timeout_s",
        "Ranks would give up on each other before the node that is gone is named",
    ),
    TimeoutOrder(
        "elastic.hang_min_s",
        "elastic.hang_slow_s",
        "A usual step would be given more time than a save",
        may_be_equal=True,
    ),
    TimeoutOrder(
        "elastic.hang_min_s",
        "elastic.collective_timeout_s",
        "A healthy rank would give up on the others, and be named, before the one that hangs is",
    ),
    TimeoutOrder(
        "elastic.hang_slow_s",
        "elastic.collective_timeout_s",
        "A healthy rank would give up on the others, and be named, before the one that hangs is",
    ),
    TimeoutOrder(
        "elastic.collective_timeout_s",
        "elastic.restart_timeout_s",
        "Nodes that restart would give up on those whose ranks still wait in a collective",
    ),
    TimeoutOrder(
        "elastic.drain_timeout_s",
        "launch.slurm.signal_before_s",
        "Slurm would kill the run at its time limit in the middle of a drain",
        may_be_equal=True,
        on="slurm",
    ),
)


def check_timeouts(recipe: Recipe, *, on: str | None = None) -> Iterable[Problem]:
    """Every inverted pair.

    Args:
        on: The launcher, where it is known. A recipe that says something of a launcher is checked
            for it in any case.
    """
    for order in TIMEOUTS:
        if order.on is not None and order.on != on and not _is_configured(recipe, order.on):
            continue
        shorter, longer = (attrgetter(name)(recipe) for name in (order.shorter, order.longer))
        if "auto" in (shorter, longer):
            continue  # made to fit
        if shorter > longer or (shorter == longer and not order.may_be_equal):
            relation = "above" if order.may_be_equal else "not below"
            text = (
                f"={shorter:g} is {relation} {order.longer}={longer:g}. {order.reason}. Lower the "
                "one or raise the other."
            )
            yield Problem(order.shorter, text)


def _is_configured(recipe: Recipe, launcher: str) -> bool:
    return bool(getattr(recipe.launch, launcher).model_fields_set)


def restart_timeout_s(elastic: Elastic) -> float:
    """``elastic.restart_timeout_s``, or what it is made to be."""
    asked = elastic.restart_timeout_s
    return elastic.collective_timeout_s + _OTHERS_COME_S if asked == "auto" else asked


def hang_min_s(elastic: Elastic) -> float:
    """``elastic.hang_min_s``, or what it is made to be."""
    if elastic.hang_min_s != "auto":
        return elastic.hang_min_s
    slow_s = math.inf if elastic.hang_slow_s == "auto" else elastic.hang_slow_s
    return min(_HANG_MIN_S, 0.5 * elastic.collective_timeout_s, slow_s)


def hang_slow_s(elastic: Elastic) -> float:
    """``elastic.hang_slow_s``, or what it is made to be."""
    if elastic.hang_slow_s != "auto":
        return elastic.hang_slow_s
    return max(0.8 * elastic.collective_timeout_s, hang_min_s(elastic))
