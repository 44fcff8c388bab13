"""Source files that hold something else than their names say, wherever they are stored."""

from typing import BinaryIO

from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.errors import SourceError
from shardyard.file_faults import POINTER_BYTES, pointer_file_error, web_page_error

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
