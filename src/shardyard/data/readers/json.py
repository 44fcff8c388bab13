"""Read JSON: files of one list or of objects, JSON lines, and compressed files."""

import bz2
import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, BinaryIO, cast

from shardyard.data.byte_ranges import SourceFile, Span, TextSection, escape_text
from shardyard.data.readers.columns import DECODER, TextOf, not_json
from shardyard.data.readers.read_errors import FileLocation, Rewind, decode, extra, open_rewound
from shardyard.errors import SourceError

MOST_BYTES = 2**30
"""Most bytes of a file, which is held in memory; a larger file is rejected."""


def read_json_file(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """A list of objects, or objects one after the other: one object, or JSON lines by this name."""
    if span.stop > MOST_BYTES:
        raise SourceError(
            f"{escape_text(span.file.path)} has {span.stop:,} bytes, and a .json file is read "
            f"whole, up to {MOST_BYTES:,}. Write one object a line into a .jsonl file, as "
            "`jq -c '.[]' FILE.json > FILE.jsonl` does for a list; if it is written so already, "
            "rename it."
        )
    rewind = partial(open_rewound, file)
    raw = file.read(span.stop).removeprefix(codecs.BOM_UTF8)
    content = decode(raw, FileLocation(span.file, rewind))
    try:
        for at, row in _json_values(content):
            place = FileLocation(span.file, rewind, text=content, at=at)
            text = text_of(row, place)
            if text:
                yield TextSection(text, begins=True, ends=True, location=place)
    except json.JSONDecodeError as error:
        form = "A .json file holds a list of objects, or objects one after the other."
        place = FileLocation(span.file, rewind, text=content, at=error.pos)
        raise not_json(place, error, form) from error


_SPACE = re.compile(r"[ \t\r\n]*")


def _json_values(text: str) -> Iterator[tuple[int, Any]]:
    """(where it begins, value) of each item of a list, and of each value outside of lists."""
    at = _after_space(text, 0)
    while at < len(text):
        if text[at] == "[":
            at = yield from _json_items(text, at)
        else:
            value, end = DECODER.raw_decode(text, at)
            yield at, value
            at = _after_space(text, end)


def _json_items(text: str, at: int) -> Generator[tuple[int, Any], None, int]:
    """Like ``_json_values``, for the list that begins at ``at``; returns where the rest begins."""
    at = _after_space(text, at + 1)
    if text.startswith("]", at):
        return _after_space(text, at + 1)
    while True:
        value, end = DECODER.raw_decode(text, at)
        yield at, value
        at = _after_space(text, end)
        if text.startswith("]", at):
            return _after_space(text, at + 1)
        if not text.startswith(",", at):
            raise json.JSONDecodeError("Expecting ',' or ']' after an item", text, at)
        at = _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


# Packed files: how one is unpacked as it is read, and how one that cannot be is told.


@contextmanager
def decompression_errors(file: SourceFile, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of unpacking into an error that names the file.

    Args:
        errors: Error types of the unpacking library, in addition to the common ones.
    """
    caught: tuple[type[Exception], ...] = (EOFError, zlib.error, OSError, *errors)
    try:
        yield
    except caught as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, and not of what stands in the file
        raise SourceError(
            f"{escape_text(file.path)} cannot be unpacked: {error}. It is cut off, damaged, or "
            "packed in "
            "another way than its name says. Test it (`gzip -t`, `zstd -t`, `bzip2 -t`, `xz -t`), "
            "then copy or pack it again."
        ) from error


def open_bz2(file: BinaryIO) -> IO[bytes]:
    """A file packed by bzip2, in one stream or several, from its beginning."""
    return cast(IO[bytes], bz2.BZ2File(open_rewound(file)))


# JSON lines: one object a line, plain or packed by gzip, zstd, bzip2 or xz.
#
# A plain file is read by ranges of bytes, each by whoever works on it; a packed one as a whole.

MOST_LINE_BYTES = 2**28
"""A packed file can hold a thousand times its size in one line, of which reading takes the memory
twice."""
_READ_BYTES = 2**20


def read_json_lines(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The documents whose lines begin in the span."""
    file.seek(max(0, span.start - 1))
    if span.start:  # the line in progress belongs to the span before; it may be as long as the file
        while (part := file.readline(_READ_BYTES)) and not part.endswith(b"\n"):
            pass
    for section, end in _rows(file, partial(open_rewound, file), span.file, text_of):
        if section is not None:
            yield section
        if end >= span.stop:
            return


def read_gzip(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """All documents of a file packed by gzip."""

    def opened() -> IO[bytes]:
        return cast(IO[bytes], gzip.GzipFile(fileobj=open_rewound(file)))

    yield from _unpacked(opened, gzip.BadGzipFile, span.file, text_of)


def read_zstd(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """All documents of a file packed by zstd, in one frame or several.

    Raises:
        RequestError: What unpacks it is not installed.
    """
    zstd = extra(
        "zstd", "compression.zstd", "backports.zstd", what=f"{escape_text(span.file.path)}"
    )

    def opened() -> IO[bytes]:
        return cast(IO[bytes], zstd.ZstdFile(open_rewound(file)))

    yield from _unpacked(opened, zstd.ZstdError, span.file, text_of)


def read_bz2(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """All documents of a file packed by bzip2."""
    yield from _unpacked(partial(open_bz2, file), OSError, span.file, text_of)


def read_xz(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """All documents of a file packed by xz."""

    def opened() -> IO[bytes]:
        return cast(IO[bytes], lzma.LZMAFile(open_rewound(file)))

    yield from _unpacked(opened, lzma.LZMAError, span.file, text_of)


def _unpacked(
    opened: Rewind, error_type: type[Exception], file: SourceFile, text_of: TextOf
) -> Iterator[TextSection]:
    with decompression_errors(file, error_type):
        for section, _ in _rows(opened(), opened, file, text_of):
            if section is not None:
                yield section


def _rows(
    content: IO[bytes], rewind: Rewind, file: SourceFile, text_of: TextOf
) -> Iterator[tuple[TextSection | None, int]]:
    """The document of each line, if it has one, and where the line ends."""
    offset = content.tell()
    while line := content.readline(MOST_LINE_BYTES):
        place = FileLocation(file, rewind, offset)
        if len(line) == MOST_LINE_BYTES and line[-1:] != b"\n":
            raise SourceError(
                f"{place}: a line of more than {MOST_LINE_BYTES:,} bytes, which is held in memory "
                "as a whole. Cut the document into several, or leave it out."
            )
        offset += len(line)
        yield _document(line, place, text_of), offset


def _document(line: bytes, location: FileLocation, text_of: TextOf) -> TextSection | None:
    if not line.strip():
        return None
    decoded = decode(line.removeprefix(codecs.BOM_UTF8).rstrip(), location)
    try:
        row = DECODER.decode(decoded)
    except json.JSONDecodeError as error:
        raise not_json(location, error, "Each line of this file is one object.") from error
    text = text_of(row, location)
    return TextSection(text, begins=True, ends=True, location=location) if text else None
