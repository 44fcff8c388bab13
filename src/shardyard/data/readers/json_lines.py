"""JSON lines: one object a line, plain or packed by gzip, zstd or bzip2.

A plain file is read by ranges of bytes, each by whoever works on it; a packed one as a whole.
"""

import codecs
import gzip
import json
from collections.abc import Iterator
from functools import partial
from typing import IO, BinaryIO, cast

from shardyard.data.byte_ranges import Section, SourceFile, Span, shown
from shardyard.data.optional_imports import extra
from shardyard.data.readers.json_values import DECODER, not_json
from shardyard.data.readers.packed import bunzipped, unpacking
from shardyard.data.readers.read_errors import Place, Rewind, decode, rewound
from shardyard.data.readers.rows import TextOf
from shardyard.errors import SourceError

MOST_LINE_BYTES = 2**28
"""A packed file can hold a thousand times its size in one line, of which reading takes the memory
twice."""
_READ_BYTES = 2**20


def read_json_lines(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[Section]:
    """The documents whose lines begin in the span."""
    file.seek(max(0, span.start - 1))
    if span.start:  # the line in progress belongs to the span before; it may be as long as the file
        while (part := file.readline(_READ_BYTES)) and not part.endswith(b"\n"):
            pass
    for section, end in _rows(file, partial(rewound, file), span.file, text_of):
        if section is not None:
            yield section
        if end >= span.stop:
            return


def read_gzip(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[Section]:
    """All documents of a file packed by gzip."""

    def opened() -> IO[bytes]:
        return cast(IO[bytes], gzip.GzipFile(fileobj=rewound(file)))

    yield from _unpacked(opened, gzip.BadGzipFile, span.file, text_of)


def read_zstd(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[Section]:
    """All documents of a file packed by zstd, in one frame or several.

    Raises:
        RequestError: What unpacks it is not installed.
    """
    zstd = extra("zstd", "compression.zstd", "backports.zstd", what=f"{shown(span.file.path)}")

    def opened() -> IO[bytes]:
        return cast(IO[bytes], zstd.ZstdFile(rewound(file)))

    yield from _unpacked(opened, zstd.ZstdError, span.file, text_of)


def read_bz2(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[Section]:
    """All documents of a file packed by bzip2."""
    yield from _unpacked(partial(bunzipped, file), OSError, span.file, text_of)


def _unpacked(
    opened: Rewind, wrong: type[Exception], file: SourceFile, text_of: TextOf
) -> Iterator[Section]:
    with unpacking(file, wrong):
        for section, _ in _rows(opened(), opened, file, text_of):
            if section is not None:
                yield section


def _rows(
    content: IO[bytes], rewind: Rewind, file: SourceFile, text_of: TextOf
) -> Iterator[tuple[Section | None, int]]:
    """The document of each line, if it has one, and where the line ends."""
    offset = content.tell()
    while line := content.readline(MOST_LINE_BYTES):
        place = Place(file, rewind, offset)
        if len(line) == MOST_LINE_BYTES and line[-1:] != b"\n":
            raise SourceError(
                f"{place}: a line of more than {MOST_LINE_BYTES:,} bytes, which is held in memory "
                "as a whole. Cut the document into several, or leave it out."
            )
        offset += len(line)
        yield _document(line, place, text_of), offset


def _document(line: bytes, place: Place, text_of: TextOf) -> Section | None:
    if not line.strip():
        return None
    decoded = decode(line.removeprefix(codecs.BOM_UTF8).rstrip(), place)
    try:
        row = DECODER.decode(decoded)
    except json.JSONDecodeError as error:
        raise not_json(place, error, "Each line of this file is one object.") from error
    text = text_of(row, place)
    return Section(text, begins=True, ends=True, place=place) if text else None
