"""A recipe with every setting that can be known before its data is prepared."""

from collections.abc import Sequence

from shardyard.config.load import Source
from shardyard.config.resolve import Preview
from shardyard.control.request import Request, sources_of


def resolve(recipe: Source | Sequence[Source], *overrides: Source) -> Preview:
    """Check a recipe and settle what is ``auto``, with the reason of each; needs no data.

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``; or several of them.
        overrides: ``section.key=value``, or more of the recipe; later ones win.

    Raises:
        RequestError: Anything in it is wrong; every problem that can be seen is named.
    """
    words = sources_of(recipe, overrides)
    return Request.read(words, to_train=False, needs_weights=False, only_looks=True).preview()
