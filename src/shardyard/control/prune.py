"""Prepared data sets that no run reads: found by their form, deleted when that is agreed to."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from shardyard.config.schema import Recipe
from shardyard.errors import StorageError
from shardyard.files import read_json_object
from shardyard.locks import close_locked, take_lock

_NAME = re.compile(r".+-[0-9a-f]{16}")
_MANIFESTS = {"manifest.json": {"request", "fingerprint", "splits"}, "mixture.json": {"parts"}}
"""What each kind of data set is known by: the file written last, and keys that it has."""
_BESIDE = {".lock", "pieces", "sources", *_MANIFESTS}
_OF_TOKENIZER = re.compile(r"tokenizer.*\.json|special_tokens_map\.json|chat_template\.jinja")


@dataclass(frozen=True)
class Unused:
    """A data set that no run reads."""

    folder: Path
    num_bytes: int


def unused_sets(recipe: Recipe) -> list[Unused]:
    """The finished data sets in ``data.dir`` that no attempt of a run in ``run.dir`` names.

    A folder that is not of the form that `prepare` writes, holds a file that it did not write, or
    is being written, is none.
    """
    told = "".join(_what_runs_read(Path(recipe.run.dir).expanduser()))
    above = Path(recipe.data.dir).expanduser()
    folders = sorted(above.iterdir()) if above.is_dir() else []
    return [
        Unused(folder, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        for folder in folders
        if _is_ours(folder) and folder.name not in told
    ]


def delete(unused: Unused) -> bool:
    """Delete a data set; False: a training reads it or a command writes it, so it stays.

    Raises:
        StorageError: The file system refused.
    """
    try:
        lock = os.open(unused.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            if not take_lock(lock) or not all(map(_is_unread, _MANIFESTS, repeat(unused.folder))):
                return False
            for name in _MANIFESTS:  # first: what is left is no data set, whatever happens next
                (unused.folder / name).unlink(missing_ok=True)
            shutil.rmtree(unused.folder)
        finally:
            close_locked(lock)
    except OSError as error:
        raise StorageError(
            f"{error.filename} cannot be deleted: {error.strerror}. Check that it is yours; the "
            "rest of its folder can be deleted by hand."
        ) from error
    return True


def _is_unread(name: str, folder: Path) -> bool:
    """Whether no training reads a data set, of whatever run.dir; see ``InUse``."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    is_free = take_lock(descriptor)
    close_locked(descriptor)
    return is_free


def _what_runs_read(runs: Path) -> Iterator[str]:
    """What each attempt was given, as text: names of data sets stand in it, even if it is torn."""
    for path in runs.glob("*/attempts/*/resolved.json"):
        yield path.read_text(errors="replace")


def _is_ours(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir() or not _NAME.fullmatch(folder.name):
        return False
    for name, keys in _MANIFESTS.items():
        try:
            content = read_json_object(folder / name)
        except (OSError, ValueError):
            continue
        if keys <= content.keys():
            known = {*content.get("files", ()), *_BESIDE}
            names = {path.name for path in folder.iterdir()} - known
            return not (folder / "pieces").exists() and all(map(_OF_TOKENIZER.fullmatch, names))
    return False
