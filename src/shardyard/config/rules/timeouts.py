"""Check the order of timeouts; an inverted pair is rejected, with both values.

A process that waits must wait longer than the one that finds the cause. Otherwise the wrong one
gives up first, and names the wrong cause or loses the state. Launchers derive some timeouts
themselves, so these have no row: the grace of a pod and of a Batch container is
``elastic.drain_timeout_s`` and a margin. ``launch.time_limit`` has none either: a short job never
needs it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from shardyard.config.schema.recipe import Elastic, Recipe
from shardyard.errors import Problem

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
