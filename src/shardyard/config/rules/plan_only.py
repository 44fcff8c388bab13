"""Settings that can be planned but not trained yet, in a recipe or a script."""

from collections.abc import Iterable

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem

DEVICES = "a machine with cuda, xpu or hpu"
"""What to use in place of a device that cannot be trained on."""


def planned_only(path: str, value: object, what: str, remedy: str) -> Problem:
    """The problem of one."""
    return Problem(path, f"={value}: {what} can be planned, not trained yet. Use {remedy}.")


def settings_planned_only(recipe: Recipe) -> Iterable[Problem]:
    """Yield a problem for each setting whose value by itself can only be planned."""
    if recipe.cluster.device == "xla":
        yield planned_only("cluster.device", "xla", "a run on Trainium or TPU", DEVICES)
