"""A recipe with every setting that can be known before its data is prepared."""

from collections.abc import Sequence
from typing import Any

from shardyard.config.load import Source
from shardyard.config.resolve import Preview
from shardyard.config.resolved import settings_in
from shardyard.control.request import Request, sources_of


def resolve_recipe(recipe: Source | Sequence[Source], *overrides: Source) -> Preview:
    """Check a recipe and settle what is ``auto``, with the reason of each; needs no data.

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``; or several of them.
        overrides: ``section.key=value``, or more of the recipe; later ones win.

    Raises:
        RequestError: Anything in it is wrong; every problem that can be seen is named.
    """
    words = sources_of(recipe, overrides)
    return Request.read(words, to_train=False, needs_weights=False, only_looks=True).preview()


def settings_of(request: Request, preview: Preview) -> dict[str, dict[str, Any]]:
    """Dotted name -> ``value`` and ``reason`` of every setting, as `shardyard config` has them."""
    given = settings_in(request.recipe.model_dump(mode="json", exclude_unset=True))
    values = settings_in(preview.recipe.model_dump(mode="json"))
    return {
        name: {
            "value": value,
            "reason": preview.reasons.get(name, "given" if name in given else "default"),
        }
        for name, value in values.items()
        if value != {} or name != "secrets"  # a section without settings
    }
