"""Origins of settings: which site file gave a value, also after it was merged and written down.

Processes that train read them of a resolved recipe; this module opens no file.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.config.validate import setting_named
from shardyard.errors import Problem


def put_below(
    tree: dict[str, Any], settings: Mapping[str, Any], origins: Mapping[str, str]
) -> None:
    """Fill in, in place, what a recipe leaves open, and note where that comes from.

    Mappings, such as ``launch.env``, are merged key by key.

    Args:
        settings: Sections with settings of site files.
        origins: Dotted setting, or key of one that is a mapping -> file and line.
    """
    kept = dict(origins)
    _fill(tree, settings, kept, "")
    if kept:
        run = tree.setdefault("run", {})
        run["origins"] = {**kept, **run.get("origins", {})}


def forget_origins(merged: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Drop, in place, the noted origin of each value that a later source replaces."""
    origins = (merged.get("run") or {}).get("origins")
    if not isinstance(origins, dict) or "origins" in (tree.get("run") or {}):
        return
    for name in leaves(tree):
        _forget(origins, name)


def origin_of(recipe: Recipe, name: str) -> str | None:
    """Return which site file a value comes from, in words; None: from no site file."""
    origins = recipe.run.origins
    if name in origins:
        return f"site file {origins[name]}"
    keys = [key for key in origins if key.startswith(f"{name}.")]
    words = [f"{key.removeprefix(f'{name}.')} from site file {origins[key]}" for key in keys]
    return "; ".join(words) or None


def with_origin(problem: Problem, recipe: Recipe) -> Problem:
    """The problem, and which site file its value comes from."""
    name = problem.path.partition("[")[0]
    origin = origin_of(recipe, name)
    return problem if origin is None else Problem(problem.path, f"{problem.text} ({origin})")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of each value that is no mapping, or an empty one."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        elif not isinstance(value, Mapping) or setting_named(name) is not None:
            yield name


def _fill(tree: dict[str, Any], below: Mapping[str, Any], origins: dict[str, str], at: str) -> None:
    for key, value in below.items():
        name = f"{at}{key}"
        if key not in tree:
            tree[key] = value
        elif isinstance(tree[key], dict) and isinstance(value, Mapping):
            _fill(tree[key], value, origins, f"{name}.")
        else:
            _forget(origins, name)


def _forget(origins: dict[str, str], name: str) -> None:
    for one in [one for one in origins if one == name or one.startswith(f"{name}.")]:
        del origins[one]
