"""Datasets of data.eval_sets: text that is only validated on, each set for itself.

Each has a folder of its own, with the tokenizer of the data that is trained on. Other recipes of
the same tokenizer use it too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardyard.config.mixture import single_source_recipes
from shardyard.config.resolved import DatasetMetadata, EvalSetMetadata
from shardyard.config.schema.data import Sources
from shardyard.config.schema.recipe import Recipe
from shardyard.data.byte_ranges import escape_text
from shardyard.data.prepare import Progress, prepare
from shardyard.data.splits import find_corpus
from shardyard.data.text_datasets import (
    report_progress_of,
    with_prepared_tokenizer,
)
from shardyard.errors import RequestError


def prepare_eval_sets(
    recipe: Recipe,
    metadata: DatasetMetadata,
    *,
    progress: Progress,
    folders: Mapping[str, Path] | None = None,
) -> tuple[EvalSetMetadata, ...]:
    """Prepare each set of a recipe; returns at once if all are there already.

    Args:
        metadata: Data that the recipe trains on, prepared.
        folders: Folder of each set where another node has prepared the same, by name; None: named
            by the request.

    Raises:
        RequestError: A set is trained on, does not exist, or does not fit the recipe.
        SourceError: Text cannot be read.
        DataError: Text changes meanwhile, or existing data is damaged.
        StorageError: The file system rejected a write.
    """
    sets = {name: _recipe_of_set(recipe, each) for name, each in recipe.data.eval_sets.items()}
    _check_not_trained_on(recipe, sets)
    found = []
    for name, each in sets.items():
        with _named(name):
            data = prepare(
                with_prepared_tokenizer(each, Path(metadata.dir)),
                model_dir=None,
                progress=partial(report_progress_of, progress, name),
                folder=None if folders is None else folders.get(name),
                eval_set=name,
            )
        found.append(EvalSetMetadata(name=name, data=data))
    return tuple(found)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the set in errors about settings that all data share, such as data.seq_len."""
    try:
        yield
    except RequestError as error:
        setting = f"data.eval_sets.{name}"
        if setting in str(error):
            raise
        raise RequestError(f"{setting}: {error}") from error


def _recipe_of_set(recipe: Recipe, source: Sources) -> Recipe:
    """The recipe of one set, as if it were all of the data."""
    update: dict[str, Any] = {"mixture": (), "source": source, "eval_source": None, "eval_sets": {}}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=update)})


def _check_not_trained_on(recipe: Recipe, sets: Mapping[str, Recipe]) -> None:
    """Raise if a file of a set is trained on, too.

    Raises:
        RequestError: One is.
    """
    trained = {
        file.path: each.data.source
        for each in single_source_recipes(recipe)
        if each.data.module is None
        for file in find_corpus(each).files
        if file.split != "eval"
    }
    for name, each in sets.items():
        shared = [file for file in find_corpus(each, eval_set=name).files if file.path in trained]
        if shared:
            more = f" and {len(shared) - 1:,} more" if len(shared) > 1 else ""
            raise RequestError(
                f"data.eval_sets.{name}={each.data.source!r}: {escape_text(shared[0].path)}{more} "
                f"is trained on, too, by data.source={trained[shared[0].path]!r}. Move it to a "
                "folder that is not trained on, or name the files to train on by a glob."
            )
