"""Datasets of the user's own as sources of a mixture: rows become files, tokens stay items."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardyard.config.mixture import recipe_of_items
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.own.dataset import SETTING
from shardyard.data.own.prepare import check_task, open_splits, prepare_items
from shardyard.data.own.rows import row_files, rows_lock
from shardyard.data.prepare import Progress, chosen_tokenizer
from shardyard.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class MixtureSources:
    """Sources of a mixture, by name."""

    files: dict[str, Recipe] = field(default_factory=dict)
    """Recipe of each source whose text is in files."""
    items: dict[str, DatasetMetadata] = field(default_factory=dict)
    """Each source that training reads by number."""


@contextmanager
def opened_sources(
    recipe: Recipe,
    sources: Mapping[str, Recipe],
    *,
    model_dir: Path | None,
    progress: Progress,
    rows: int | None,
) -> Iterator[MixtureSources]:
    """Write the rows of modules to files, which are there while the block runs; prepare tokens.

    Args:
        sources: Recipe of each source, by name.

    Raises:
        RequestError: The user's function or an item of its dataset cannot be used.
        StorageError: The file system rejected a write.
    """
    found = MixtureSources()
    with ExitStack() as files:
        if any(each.data.module is not None for each in sources.values()):
            files.enter_context(rows_lock(recipe.data, progress))
        for name, source in sources.items():
            if source.data.module is None:
                found.files[name] = source
                continue
            opened = open_splits(source, progress)
            if opened.kind == "rows":
                found.files[name] = files.enter_context(row_files(source, opened.rows, progress))
                continue
            if opened.kind != "tokens":
                raise RequestError(
                    f"{SETTING}={source.data.module}: a mixture reads text or token ids, and its "
                    f"items are {opened.kind}. Train on it without data.mixture, or return those."
                )
            items = recipe_of_items(source)
            check_task(items, opened.kind)
            tokenizer = chosen_tokenizer(recipe, model_dir)
            if tokenizer is None:
                raise RequestError(
                    f"{SETTING}={source.data.module} returns token ids, and the other sources of "
                    "data.mixture need the tokenizer that made them. Set data.tokenizer to its "
                    "folder, or return text."
                )
            found.items[name] = prepare_items(items, opened, tokenizer, rows=rows, folder=None)
        yield found
