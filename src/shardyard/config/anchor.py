"""Relative paths of a recipe become absolute: they start in the current folder.

A run is resumed from anywhere, so what it records must not depend on where it was started.
"""

import os
from pathlib import Path
from typing import Any, TypeVar

from shardyard.config.reach import reach_problems
from shardyard.config.schema.data import Sources
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sight import Sight
from shardyard.config.sources import is_name, is_remote
from shardyard.errors import RecipeError


def anchor_paths(recipe: Recipe, sight: Sight | None = None) -> Recipe:
    """The recipe with its relative paths made absolute; settings that were not given stay so.

    Args:
        sight: What the nodes see that open the paths; None: this machine opens them.

    Raises:
        RecipeError: Paths that the system cannot follow.
    """
    unreached = reach_problems(recipe, sight)
    if unreached:
        raise RecipeError(unreached)
    for section, places in _places(recipe).items():
        content = getattr(recipe, section)
        given = {key: value for key, value in places.items() if key in content.model_fields_set}
        if given:
            recipe = recipe.model_copy(update={section: content.model_copy(update=given)})
    return recipe


def _places(recipe: Recipe) -> dict[str, dict[str, Any]]:
    data, path, cluster_file = recipe.data, recipe.model.path, recipe.cluster.file
    config = recipe.model.config
    is_folder = Path(data.tokenizer).expanduser().exists()  # else a hub name, or a word
    return {
        "run": {"dir": _anchor(recipe.run.dir)},
        "model": {
            "path": None if path is None else _anchor(path),
            "config": _anchor(config) if isinstance(config, str) else config,
            "dir": None if recipe.model.dir is None else _anchor(recipe.model.dir),
        },
        "cluster": {"file": None if cluster_file is None else _anchor(cluster_file)},
        "data": {
            "source": _anchor_sources(data.source),
            "eval_source": _anchor_sources(data.eval_source),
            "mixture": tuple(
                share.model_copy(
                    update={
                        "source": _anchor_sources(share.source),
                        "eval_source": _anchor_sources(share.eval_source),
                    }
                )
                for share in data.mixture
            ),
            "dir": _anchor(data.dir),
            "tokenizer": _anchor(data.tokenizer) if is_folder else data.tokenizer,
        },
    }


_Given = TypeVar("_Given", Sources, Sources | None)


def _anchor_sources(source: _Given) -> _Given:
    if source is None:
        return None
    return _anchor_source(source) if isinstance(source, str) else tuple(map(_anchor_source, source))


def _anchor_source(entry: str) -> str:
    """A path or a pattern made absolute; an address stays as it is."""
    return entry if is_name(entry) or is_remote(entry) else _anchor(entry)


def _anchor(place: str) -> str:
    return os.path.normpath(Path.cwd() / Path(place).expanduser())
