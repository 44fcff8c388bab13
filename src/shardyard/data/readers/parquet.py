"""Parquet: a column of text, read by groups of rows; a group belongs to the span it begins in."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from shardyard.data.byte_ranges import Span, TextSection, escape_text
from shardyard.data.readers.columns import TextOf, chat_hint, some_keys
from shardyard.data.readers.read_errors import extra
from shardyard.errors import SourceError

_BATCH_ROWS = 256
"""Rows whose text is held as Python objects at a time."""


def read(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The text of the groups of rows that begin in the span.

    Raises:
        RequestError: pyarrow is not installed.
        SourceError: It is no Parquet file, or has no such column of text.
    """
    path = escape_text(span.file.path)
    pyarrow = extra("parquet", "pyarrow", what=path)
    parquet = extra("parquet", "pyarrow.parquet", what=path)
    try:
        table = parquet.ParquetFile(file)
        if text_of.whole_row is None:
            _check_column(pyarrow, table, path, text_of.key)
        else:
            _check_unique_columns(table.schema_arrow.names, path)
        number = 0
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            if span.start <= min(_first_byte(about), span.file.size_bytes - 1) < span.stop:
                yield from _texts(table, group, number, path, text_of)
            number += about.num_rows
    except pyarrow.ArrowException as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        if error.errno is not None:  # of the file system, and none of Arrow's own
            raise
        raise _unreadable(path, error) from error


def _check_column(pyarrow: Any, table: Any, path: str, text_key: str) -> None:
    """Raise unless exactly one column has the name, and holds text."""
    names = table.schema_arrow.names
    if names.count(text_key) != 1:
        count = "no column" if text_key not in names else f"{names.count(text_key)} columns"
        raise SourceError(
            f"{path}: {count} {escape_text(text_key)!r} (its columns: {some_keys(names)}). "
            "data.text_key names the column that holds the text. Correct data.text_key or the "
            f"file.{chat_hint(names)}"
        )
    kind = table.schema_arrow.field(text_key).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(is_it(values) for is_it in is_text):
        raise SourceError(
            f"{path}: column {escape_text(text_key)!r} holds {kind}, not text. data.text_key names "
            "the column that holds the text. Correct data.text_key or the file."
        )


def _check_unique_columns(names: Sequence[str], path: str) -> None:
    """Raise if a row has two values of one name."""
    twins = {name for name in names if names.count(name) > 1}
    if twins:
        raise SourceError(
            f"{path}: several columns are called {some_keys(twins)}. Write the file again with "
            "names that differ."
        )


def _first_byte(group: Any) -> int:
    """Return the first byte of a row group; 0 if it has no column or no byte."""
    columns = [group.column(number) for number in range(group.num_columns)]
    pages = [
        offset
        for column in columns
        for offset in (column.dictionary_page_offset, column.data_page_offset)
        if offset  # some writers put 0 for none
    ]
    return min(pages, default=0)


def _texts(
    table: Any, group: int, number: int, path: str, text_of: TextOf
) -> Iterator[TextSection]:
    """Documents of a group whose first row is ``number`` rows behind the file's first."""
    columns = [text_of.key] if text_of.whole_row is None else None
    batches = table.iter_batches(
        batch_size=_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
    )
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:
            which = "a column" if columns is None else f"column {escape_text(text_of.key)!r}"
            raise SourceError(
                f"{path}: {which} holds bytes that are not UTF-8 in rows {number + 1:,} to "
                f"{number + len(batch):,} ({error.reason}). Write the file again from sound text."
            ) from error
        for count, row in enumerate(rows, start=number + 1):
            place = f"{path}, row {count:,}"
            text = text_of(row, place)
            if text:
                yield TextSection(text, begins=True, ends=True, location=place)
        number += len(batch)


def _unreadable(path: str, error: Exception) -> SourceError:
    why = " ".join(str(error).split())[:200].rstrip(".")
    return SourceError(
        f"{path} cannot be read as Parquet: {escape_text(why)}. It is cut off, damaged, or "
        "something else by that name. Copy or write it again."
    )
