"""Which installed packages the nodes of a run need."""

from collections.abc import Collection, Mapping

from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import SCHEMES, scheme_of
from shardyard.config.tasks import TASKS
from shardyard.families.registry import FAMILIES
from shardyard.families.shape import ModelShape
from shardyard.plugins import Group, PlugIn, brought


def plug_ins_of(recipe: Recipe, shape: ModelShape | None) -> list[PlugIn]:
    """What packages add that the nodes of a run need. A launcher is not: it starts them.

    Raises:
        RequestError: Several packages claim a name.
    """
    used: list[tuple[Group, str, Collection[str]]] = [("tasks", recipe.task.name, TASKS)]
    if shape is not None:
        used.append(("families", shape.model_type, FAMILIES))
    schemes = [scheme_of(entry) for _, entry in recipe.data.entries]
    used += [("sources", scheme, SCHEMES) for scheme in sorted({each for each in schemes if each})]
    found = [brought(group, name) for group, name, ours in used if name not in ours]
    return [plug_in for plug_in in found if plug_in is not None]


def is_needed_to_train(entry: Mapping[str, str]) -> bool:
    """Whether an entry of manifest.json is one of ``plug_ins_of``: a launcher has done its work
    when a node begins, and a reader of a suffix when the data is prepared."""
    return entry["group"] != "launchers" and not entry["name"].startswith(".")
