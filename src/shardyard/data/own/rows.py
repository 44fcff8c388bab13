"""Text and dialogues of the user's dataset: written as a JSON lines file, which is then prepared.

The file has a name and a time by its content, so equal rows are the same file to `prepare` and find
the dataset of before. It is removed once they are tokenized.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardyard.config.dataset_name import source_word
from shardyard.config.fingerprint import digest
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_prepare
from shardyard.data.own.dataset import SETTING
from shardyard.data.prepare import Progress
from shardyard.errors import DataError, RequestError, SourceError
from shardyard.io.files import locked

_CHANGE_TIME_NS = 10**9
"""Time of change of every file of rows."""


def prepare_rows(
    recipe: Recipe,
    train_rows: Iterable[Any],
    validation_rows: Iterable[Any] | None,
    *,
    progress: Progress,
    folder: Path | None,
    **options: Any,
) -> DatasetMetadata:
    """Write rows as JSON lines, let the task prepare that file, and remove it.

    Args:
        validation_rows: Rows of the eval split; None: data.eval_fraction of the others.
        folder: As ``data.prepare.prepare``, and so are ``options``.

    Raises:
        RequestError: A row is no JSON, or its text cannot be used.
        SourceError: The rows hold no text.
        StorageError: The file system rejected a write.
    """
    splits = {"train": train_rows}
    if validation_rows is not None:
        splits["eval"] = validation_rows
    with rows_lock(recipe.data, progress), row_files(recipe, splits, progress) as of_files:
        prepare = task_prepare(recipe.task.name)
        metadata: DatasetMetadata = prepare(of_files, progress=progress, folder=folder, **options)
    return replace(metadata, validation_files=None)


@contextmanager
def rows_lock(data: Data, progress: Progress) -> Iterator[None]:
    """Wait until no other process has files of rows in data.dir."""
    above = Path(data.dir).expanduser().resolve()
    above.mkdir(parents=True, exist_ok=True)
    words = "waiting for another process that prepares rows"
    with locked(above / ".rows.lock", waits=lambda: progress(words, 0, 1)):
        yield


@contextmanager
def row_files(
    recipe: Recipe, splits: Mapping[str, Iterable[Any]], progress: Progress
) -> Iterator[Recipe]:
    """Write rows as JSON lines, which are there while the block runs.

    Args:
        splits: Rows of ``train``, and of ``eval`` if there are any.

    Yields:
        The recipe that reads these files in place of the user's dataset.

    Raises:
        RequestError: A row is no JSON, or a setting has no effect on text.
    """
    data = recipe.data
    assert data.module is not None
    if data.too_long != Data().too_long and data.pack == "stream":
        raise RequestError(
            f"data.too_long={data.too_long} has no effect: {SETTING}={data.module} returns text, "
            "which is cut into windows. Set data.pack=whole, or leave it out."
        )
    name = source_word(data.module.partition(":")[2])
    progress(f"writing the rows of {SETTING}={data.module}", 0, 1)
    with scratch_folder(data) as scratch:
        digests = [
            _write_rows(scratch / split, content, data, split) for split, content in splits.items()
        ]
        source_folder = scratch.parent / f".rows-{name}-{digest(digests)}"
        files = {"data.source": source_folder / f"{name}.jsonl"}
        if "eval" in splits:
            files["data.eval_source"] = source_folder / f"{name}-eval.jsonl"
        source_folder.mkdir(exist_ok=True)
        for split, file in zip(splits, files.values(), strict=True):
            (scratch / split).replace(file)
    try:
        yield _recipe_of_files(recipe, files)
    except (DataError, RequestError, SourceError) as error:
        # The user set data.module, and never saw these files.
        text = str(error)
        for setting, file in files.items():
            text = text.replace(f"{setting}={str(file)!r}", f"{SETTING}={data.module}")
        text = text.replace(f"{source_folder}{os.sep}", "")
        raise type(error)(text, page=error.page) from error
    finally:
        shutil.rmtree(source_folder, ignore_errors=True)


@contextmanager
def scratch_folder(data: Data) -> Iterator[Path]:
    """A new folder in data.dir, which is removed at the end."""
    above = Path(data.dir).expanduser().resolve()
    above.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".items-", dir=above))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _recipe_of_files(recipe: Recipe, files: dict[str, Path]) -> Recipe:
    """Return the recipe that reads files in place of the user's dataset."""
    update: dict[str, Any] = {"module": None, "module_settings": {}}
    update |= {setting.partition(".")[2]: str(file) for setting, file in files.items()}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=update)})


def _write_rows(path: Path, rows: Iterable[Any], data: Data, split: str) -> str:
    """Write rows as JSON lines; return the SHA-256."""
    content = hashlib.sha256()
    with path.open("wb") as file:
        for number, row in enumerate(rows):
            plain = {data.text_key: row} if isinstance(row, str) else row
            try:
                line = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            except (TypeError, ValueError) as error:
                raise RequestError(
                    f"{SETTING}={data.module}: row {number} of the {split} split is no JSON "
                    f"({error}). Return a text, or a dict of texts, numbers and lists."
                ) from error
            file.write(line)
            content.update(line)
    os.utime(path, ns=(_CHANGE_TIME_NS, _CHANGE_TIME_NS))
    return content.hexdigest()
