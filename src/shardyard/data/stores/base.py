"""Operations of every kind of source: find files, and open one that holds what its name says."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from shardyard.config.sources import store_class
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.errors import RequestError, SourceError
from shardyard.file_faults import POINTER_BYTES, pointer_file_error, web_page_error

COMPILED = "__pycache__"
"""Python's cache next to source code: left out of folders, as hidden files are."""


@dataclass(frozen=True)
class ListedFile:
    """A file that an entry of data.source names."""

    path: str
    """The one absolute path, or URL, of it."""
    name: str
    """Below the folder that the entry names; else its own."""
    size_bytes: int
    version: int | str
    """Version, as in ``SourceFile``."""
    below: str | None = None
    """Path below the literal part of the entry; empty: the entry names this very file. None: the
    store does not say."""
    pattern: str = ""
    """Part of the entry that is a pattern; empty: it has none."""

    def below_entry(self, entry: str) -> str:
        """Path below the literal part of an entry; empty: the entry names this very file."""
        if self.below is not None:
            return self.below
        return "" if self.path == entry or f"/{entry}".endswith(f"/{self.name}") else self.name


class Store(Protocol):
    """One kind of place."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[ListedFile]:
        """Files that an entry of data.source names, in a fixed order.

        Args:
            own: Folders of ours on this machine: left out of a folder that they lie in.

        Raises:
            RequestError: There is no such place.
            AccessError: It may not be looked at.
            CapacityError: It cannot be reached now.
        """

    def open(self, file: SourceFile) -> BinaryIO:
        """Open a file that ``find`` has found, to read and to seek in.

        Reads return the version that was found, or fail.
        """


def store_of(entry: str) -> Store:
    """Return the store of an entry of data.source, or of a file; its scheme is a known one."""
    store: type[Store] = store_class(entry)
    missing = [name for name in ("find", "open") if not hasattr(store, name)]
    if missing:
        raise RequestError(
            f"{entry.partition('://')[0]}:// is read by {store!r}, which has no "
            f"{' and no '.join(missing)} (shardyard.data.stores.base.Store). Fix, update or "
            "uninstall the package that adds it."
        )
    return store()


def find_all(
    entries: Sequence[str], *, own: Collection[Path], setting: str = "data.source"
) -> list[tuple[str, list[ListedFile]]]:
    """Return the files of each entry of a setting, in order.

    Raises:
        RequestError: An entry has no files; reports all such entries.
        AccessError: The rights to look at a remote place are missing.
        CapacityError: It cannot be reached.
    """
    listed, problems = [], []
    for entry in entries:
        try:
            found = list(store_of(entry).find(entry, own=own))
        except RequestError as error:
            problems.append(str(error).replace("data.source", setting))
            continue
        listed.append((entry, found))
        if not found and len(entries) > 1:
            problems.append(
                f"{setting}={escape_text(entry)!r} holds no file; hidden files in folders are left "
                "out. Correct the path, or take it out of the list."
            )
    if problems:
        raise RequestError("\n".join(problems))
    return listed


def open_file(file: SourceFile) -> BinaryIO:
    """Open a file wherever it is.

    Raises:
        SourceError: It is a pointer of Git LFS, a web page, or empty where its format has no such.
    """
    return reject_faulty(store_of(file.path).open(file), file)


def is_hidden(name: str) -> bool:
    """Whether a file in a folder is hidden, or lies below what is, or was made by Python."""
    return any(part[:1] == "." or part == COMPILED for part in name.split("/"))


_NEVER_PAGES = frozenset(
    {
        "json", "jsonl", "jsonl_gz", "jsonl_zst", "jsonl_bz2", "wikipedia_bz2", "bert_h5",
        "parquet", "tar", "tar.gz", "tgz", "gz",
    }
)  # fmt: skip
"""Formats whose files never begin as a web page does."""

_NEVER_EMPTY = _NEVER_PAGES - {"jsonl"}
"""Formats in which no bytes at all are no file: a writer leaves a header at least."""

_MOST_PAGE_BYTES = 2**20
"""Error pages that were saved in the place of a file are smaller."""


def reject_faulty(opened: BinaryIO, file: SourceFile) -> BinaryIO:
    """The same file at its beginning, unless it is a pointer, a web page, or empty.

    Only small files are looked at, since pointers and error pages are small.

    Raises:
        SourceError: It is one of these; names the cause and the command that fetches the file.
    """
    why = _faulty_reason(opened, file)
    if why is None:
        return opened
    opened.close()
    raise SourceError(f"{escape_text(file.path)} {why}")


def _faulty_reason(opened: BinaryIO, file: SourceFile) -> str | None:
    size = file.size_bytes
    if size == 0 and file.format in _NEVER_EMPTY:
        return "is empty (0 bytes). Copy it again, or take it out of data.source."
    may_be_page = file.format in _NEVER_PAGES and size < _MOST_PAGE_BYTES
    if not 0 < size < POINTER_BYTES and not may_be_page:
        return None
    start = opened.read(POINTER_BYTES)
    opened.seek(0)
    folder = escape_text(file.path.rpartition("/")[0]) or "."
    pointer = pointer_file_error(start, size=size, folder=folder)
    return pointer or (web_page_error(start) if may_be_page else None)
