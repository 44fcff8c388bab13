"""Datasets that a run reads: what `prepare --prune` has to know of them.

While it trains, a shared lock on what would be deleted first; from then on, a line in the dataset.
"""

import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from shardyard.io.files import FILE_MODE, MOST_JSON_BYTES, close_locked, read_json_object, take_lock

MANIFESTS = ("manifest.json", "mixture.json")
"""File that is written last: of a dataset, and of a mixture, which reads other datasets."""

READERS = "readers.jsonl"
"""A line for each run that has read the dataset."""


class InUse:
    """Keeps datasets from being pruned until closed or until this process ends."""

    def __init__(self, *folders: Path, run: Path) -> None:
        """Args:
        folders: Of datasets, or of a mixture. What cannot be locked is passed over: reading it
            fails by itself.
        run: Folder of the run, which may be resumed later.
        """
        self._descriptors: list[int] = []
        for path in chain.from_iterable(map(_manifests, folders)):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            take_lock(descriptor, is_shared=True)
            self._descriptors.append(descriptor)
            _note_reader(path.with_name(READERS), run)

    def close(self) -> None:
        """Let the datasets be pruned."""
        while self._descriptors:
            close_locked(self._descriptors.pop())


def _note_reader(path: Path, run: Path) -> None:
    """Add a run to those that have read a dataset, unless the folder cannot be written."""
    line = json.dumps({"run": str(run.absolute())}).encode() + b"\n"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags, FILE_MODE), "r+b", buffering=0) as file:
            if line not in file.read(MOST_JSON_BYTES):
                file.write(line)
    except OSError:
        return


def _manifests(folder: Path) -> Iterator[Path]:
    yield from (folder / name for name in MANIFESTS)
    try:
        parts = read_json_object(folder / "mixture.json")["parts"]
        names = [part["folder"] for part in parts]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in names:
        yield from (folder / name / manifest for manifest in MANIFESTS)
