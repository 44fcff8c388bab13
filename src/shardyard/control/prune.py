"""Prepared datasets that no run needs: found by their form, deleted when the user agrees.

A run needs what its attempts were given, also when it does not train now: it may be resumed. Runs
are those in ``run.dir`` and those that a dataset's own list of readers names.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from shardyard.config.dataset_name import dataset_words
from shardyard.config.load import load_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError, ShardyardError, StorageError
from shardyard.io.files import (
    MOST_JSON_BYTES,
    close_locked,
    parse_json,
    read_json_object,
    read_plain,
    take_lock,
)
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir

_NAME = re.compile(r"(?P<word>.+)-[0-9a-f]{16}")
_MANIFESTS = {"manifest.json": {"request", "fingerprint", "splits"}, "mixture.json": {"parts"}}
"""File that marks each kind of dataset: the one written last, with keys that it has."""
_READERS = "readers.jsonl"
_BESIDE = {".lock", "pieces", "sources", _READERS, *_MANIFESTS}
_OF_TOKENIZER = re.compile(r"tokenizer.*\.json|special_tokens_map\.json|chat_template\.jinja")


@dataclass(frozen=True)
class Unused:
    """A dataset that no run needs, as far as runs can be found."""

    folder: Path
    num_bytes: int
    lost_readers: tuple[Path, ...] = ()
    """Runs that have read it, whose folders are not on this machine."""


@dataclass(frozen=True)
class RetainedDataset:
    """A dataset that stays."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class DataSets:
    """The finished datasets in ``data.dir``."""

    unused: list[Unused] = field(default_factory=list)
    retained: list[RetainedDataset] = field(default_factory=list)


def find_sets(recipe: Recipe) -> DataSets:
    """Sort the finished datasets in ``data.dir`` by whether a run needs them.

    A folder that is not of the form that `prepare` writes, holds a file that it did not write, or
    is being written, is none.

    Raises:
        StorageError: What a run was given cannot be read.
    """
    above = Path(recipe.data.dir).expanduser()
    found, runs = DataSets(), list(_runs_in(Path(recipe.run.dir).expanduser()))
    given = {run: text for run in runs if (text := _resolved_text(run))}
    waiting = {run: _words_of(run, above) for run in runs if run not in given and _is_launched(run)}
    for folder in sorted(above.iterdir()) if above.is_dir() else []:
        word = _NAME.fullmatch(folder.name)
        if word is None or not _is_prepared_dataset(folder):
            continue
        readers, lost = _readers(folder)
        needs = [run for run, text in given.items() if folder.name in text] + readers
        waits = [run for run, words in waiting.items() if words is None or word["word"] in words]
        if needs:
            why = f"run {needs[0].handle} reads it, and may be resumed"
            found.retained.append(RetainedDataset(folder, why))
        elif waits:
            why = f"run {waits[0].handle} was launched and has not begun; it may read it"
            found.retained.append(RetainedDataset(folder, why))
        else:
            files = (path for path in folder.rglob("*") if path.is_file())
            size = sum(path.stat().st_size for path in files)
            found.unused.append(Unused(folder, size, lost))
    return found


def delete(unused: Unused) -> bool:
    """Delete a dataset; False: a training reads it or a command writes it, so it stays.

    Raises:
        StorageError: The file system rejected it.
    """
    try:
        lock = os.open(unused.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            if not take_lock(lock) or not all(
                map(_has_no_readers, _MANIFESTS, repeat(unused.folder))
            ):
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


def _has_no_readers(name: str, folder: Path) -> bool:
    """Return whether no training reads a dataset, in any run.dir; see ``InUse``."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    is_free = take_lock(descriptor)
    close_locked(descriptor)
    return is_free


def _runs_in(folder: Path) -> Iterator[RunDir]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and (run := RunDir(path)).exists:
            yield run


def _resolved_text(run: RunDir) -> str:
    """Return what the attempts were given, as text: it names datasets, even if it is torn."""
    return "".join(
        read_plain(path, limit_bytes=MOST_JSON_BYTES).decode(errors="replace")
        for path in sorted(run.path.glob("attempts/*/resolved.json"))
    )


def _is_launched(run: RunDir) -> bool:
    """Whether a scheduler may start a run, or was asked to and can be asked again."""
    try:
        ledger = Ledger(run.ledger)
        return bool(ledger.jobs() or ledger.unfinished())
    except ShardyardError:
        return True  # damaged: it may name a job


def _words_of(run: RunDir, above: Path) -> set[str] | None:
    """First parts of the names of datasets in ``above`` that a run may read; None: any of them."""
    try:
        recipe = load_recipe([run.recipe], of_run=True)
    except RequestError:
        return None
    is_here = Path(recipe.data.dir).expanduser().resolve() == above.resolve()
    return set(dataset_words(recipe)) if is_here else set()


def _readers(folder: Path) -> tuple[list[RunDir], tuple[Path, ...]]:
    """Runs that have read a dataset and are there, and paths of those that are not."""
    try:
        lines = read_plain(folder / _READERS, limit_bytes=MOST_JSON_BYTES).splitlines()
    except FileNotFoundError:
        return [], ()
    paths = []
    for line in lines:
        try:
            paths.append(Path(parse_json(line)["run"]))
        except (ValueError, KeyError, TypeError):
            continue  # torn
    runs = [RunDir(path) for path in paths if path.is_absolute()]
    there = [
        run for run in runs if run.exists and folder.name in (_resolved_text(run) or folder.name)
    ]
    return there, tuple(run.path for run in runs if not run.path.exists())


def _is_prepared_dataset(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
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
