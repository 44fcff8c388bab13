"""What every kind of place that text comes from can do: find files, and open one."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from shardyard.config.sources import store_class
from shardyard.data.spans import SourceFile
from shardyard.errors import RequestError

COMPILED = "__pycache__"
"""What Python leaves beside source code: left out of folders, as hidden files are."""


@dataclass(frozen=True)
class Found:
    """A file that an entry of data.source names."""

    path: str
    """The one absolute path, or URL, of it."""
    name: str
    """Below the folder that the entry names; else its own."""
    size_bytes: int
    version: int | str
    """As of ``SourceFile``."""


class Store(Protocol):
    """One kind of place."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[Found]:
        """Files that an entry of data.source names, in a fixed order.

        Args:
            own: Folders of ours on this machine: left out of a folder that they lie in.

        Raises:
            RequestError: There is no such place.
            AccessError: It may not be looked at.
            CapacityError: It cannot be reached now.
        """

    def open(self, file: SourceFile) -> BinaryIO:
        """A file that ``find`` has found, to read and to seek in.

        What is read of it is of the version that was found, or refused.
        """


def store_of(entry: str) -> Store:
    """Where an entry of data.source, or a file that it names, is; its scheme is a known one."""
    found: type[Store] = store_class(entry)
    missing = [name for name in ("find", "open") if not hasattr(found, name)]
    if missing:
        raise RequestError(
            f"{entry.partition('://')[0]}:// is read by {found!r}, which has no "
            f"{' and no '.join(missing)} (shardyard.data.stores.base.Store). Mend, update or "
            "uninstall the package that adds it."
        )
    return found()


def open_file(file: SourceFile) -> BinaryIO:
    """Open a file wherever it is."""
    return store_of(file.path).open(file)


def is_left_out(name: str) -> bool:
    """Whether a file in a folder is hidden, or lies below what is, or was made by Python."""
    return any(part[:1] == "." or part == COMPILED for part in name.split("/"))
