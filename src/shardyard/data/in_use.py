"""Datasets that a training reads: a shared lock on what `prepare --prune` would delete first."""

import os
from collections.abc import Iterator
from pathlib import Path

from shardyard.files import read_json_object
from shardyard.locks import close_locked, take_lock

MANIFESTS = ("manifest.json", "mixture.json")
"""File that is written last: of a dataset, and of a mixture, which reads other datasets."""


class InUse:
    """Keeps datasets from being pruned until closed or until this process ends."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: Of a dataset, or of a mixture. What cannot be locked is passed over: reading it
            fails by itself.
        """
        self._descriptors: list[int] = []
        for path in _manifests(folder):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            take_lock(descriptor, is_shared=True)
            self._descriptors.append(descriptor)

    def close(self) -> None:
        """Let the datasets be pruned."""
        while self._descriptors:
            close_locked(self._descriptors.pop())


def _manifests(folder: Path) -> Iterator[Path]:
    yield from (folder / name for name in MANIFESTS)
    try:
        parts = read_json_object(folder / "mixture.json")["parts"]
        names = [part["folder"] for part in parts]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in names:
        yield from (folder / name / manifest for manifest in MANIFESTS)
