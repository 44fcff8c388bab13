"""CSV and TSV: a header with the names of the columns, then a row a document.

Fields with separators, quotes or line ends are quoted, and quotes in them doubled (RFC 4180), as
pandas, spreadsheets and the `datasets` library write them. A file is read as a whole, because a
line end may be inside of a field.
"""

import codecs
import csv
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from shardyard.data.byte_ranges import SourceFile, Span, TextSection, escape_text
from shardyard.data.readers.columns import TextOf, some_keys
from shardyard.data.readers.json import MOST_LINE_BYTES
from shardyard.data.readers.read_errors import FileLocation, decode, open_rewound
from shardyard.errors import SourceError


def read_csv(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The documents of a file whose fields are separated by commas."""
    yield from _documents(file, span.file, text_of, separator=",")


def read_tsv(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The documents of a file whose fields are separated by tabs."""
    yield from _documents(file, span.file, text_of, separator="\t")


def _documents(
    file: BinaryIO, source: SourceFile, text_of: TextOf, *, separator: str
) -> Iterator[TextSection]:
    lines = _Lines(file, source)
    csv.field_size_limit(MOST_LINE_BYTES)  # Python's own limit of 128 KiB is less than a document
    rows = csv.reader(lines, delimiter=separator, strict=True)
    try:
        header = next(rows, [])
        _check_header(header, lines.location(), separator)
        lines.end_row()
        for row in rows:
            place = lines.location()
            lines.end_row()
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise SourceError(
                    f"{place}: the row has {len(row)} fields, and the header {len(header)} "
                    f"({some_keys(header)}). Quote fields that hold {_NAMES[separator]}, line ends "
                    "or quotes, and double quotes in them; or remove the row."
                )
            text = text_of(dict(zip(header, row, strict=True)), place)
            if text:
                yield TextSection(text, begins=True, ends=True, location=place)
    except csv.Error as error:
        raise SourceError(
            f"{lines.location()}: the row that begins here cannot be read ({error}). Quote fields "
            "with line ends or quotes, and double quotes in them; or remove the row."
        ) from error


_NAMES = {",": "commas", "\t": "tabs"}


def _check_header(header: list[str], place: FileLocation, separator: str) -> None:
    twins = {name for name in header if header.count(name) > 1}
    if twins:
        raise SourceError(
            f"{place}: several columns are called {some_keys(twins)}. Write the file again with "
            "names that differ."
        )
    other = next((each for each in _NAMES if each != separator and each in "".join(header)), None)
    if len(header) == 1 and other is not None:
        suffix = ".csv" if other == "," else ".tsv"
        raise SourceError(
            f"{place}: the header is one column, {escape_text(header[0][:80])!r}, with "
            f"{_NAMES[other]} in it. If {_NAMES[other]} separate the columns, rename the file to "
            f"{suffix}."
        )


class _Lines:
    """Lines of a file as text, and where the row in progress begins."""

    def __init__(self, file: BinaryIO, source: SourceFile) -> None:
        self._file, self._source = file, source
        self._rewind = partial(open_rewound, file)
        self._row_offset = self._offset = 0
        file.seek(0)

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        self._file.seek(self._offset)  # counting lines for a message moves it
        line = self._file.readline(MOST_LINE_BYTES)
        if not line:
            raise StopIteration
        place = FileLocation(self._source, self._rewind, self._offset)
        if not self._offset:
            line_text = decode(line.removeprefix(codecs.BOM_UTF8), place)
        else:
            line_text = decode(line, place)
        self._offset += len(line)
        return line_text

    def location(self) -> FileLocation:
        """Return the place where the row in progress begins."""
        return FileLocation(self._source, self._rewind, self._row_offset)

    def end_row(self) -> None:
        """Begin the next row at the next line."""
        self._row_offset = self._offset
