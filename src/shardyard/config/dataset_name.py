"""Name of a dataset's folder: a word of its source, and a digest of the request."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardyard.config.schema.recipe import Recipe

MIXTURE_NAME = "mixture"


def source_word(source: str | Sequence[str]) -> str:
    """A word for the folder's name, so that people can tell datasets apart."""
    first = source if isinstance(source, str) else source[0]
    words = re.sub(r"[^a-z0-9]+", "-", Path(first).stem.lower()).strip("-")
    return words[:40] or "data"


def dataset_words(recipe: Recipe) -> Iterator[str]:
    """The words of all datasets that training a recipe reads."""
    if recipe.data.module is not None:
        yield source_word(recipe.data.module.partition(":")[2])
        return
    yield from map(source_word, recipe.data.eval_sets.values())
    if not recipe.data.mixture:
        yield source_word(recipe.data.source)
        return
    yield MIXTURE_NAME
    for share in recipe.data.mixture:
        yield source_word(share.source or str(share.module).partition(":")[2])
