"""Tables of Arrow: Parquet, streams that `datasets` saves (``save_to_disk``), and Feather files.

Parquet is read by groups of rows; a group belongs to the span it begins in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from shardyard.data.byte_ranges import Span, TextSection, escape_text
from shardyard.data.readers.columns import TextOf, chat_hint, some_keys
from shardyard.data.readers.read_errors import extra
from shardyard.errors import SourceError
from shardyard.io.files import parse_json

_BATCH_ROWS = 256
"""Rows whose text is held as Python objects at a time."""
_FILE_MAGIC = b"ARROW1"
"""First bytes of a file with an index at its end; a stream has none."""


def read_parquet(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The text of the groups of rows that begin in the span.

    Raises:
        RequestError: pyarrow is not installed.
        SourceError: It is no Parquet file, or has no such column of text.
    """
    path = escape_text(span.file.path)
    pyarrow = extra("parquet", "pyarrow", what=path)
    parquet = extra("parquet", "pyarrow.parquet", what=path)
    with _arrow_errors(path, "Parquet"):
        table = parquet.ParquetFile(file)
        columns = _check_columns(pyarrow, table.schema_arrow, path, text_of)
        number = 0
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            if span.start <= min(_first_byte(about), span.file.size_bytes - 1) < span.stop:
                yield from _texts(table, group, number, path, text_of, columns)
            number += about.num_rows


def read_arrow(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """All documents of a file, a row each.

    Raises:
        RequestError: pyarrow is not installed.
        SourceError: It is no Arrow file, or has no such column of text.
    """
    path = escape_text(span.file.path)
    pyarrow = extra("parquet", "pyarrow", what=path)
    ipc = extra("parquet", "pyarrow.ipc", what=path)
    with _arrow_errors(path, "Arrow"):
        is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        columns = _check_columns(pyarrow, reader.schema, path, text_of)
        numbers = range(reader.num_record_batches) if is_file else None
        batches = map(reader.get_batch, numbers) if numbers is not None else iter(reader)
        number = 0
        for batch in batches:
            kept = batch if columns is None else batch.select(columns)
            for start in range(0, len(batch), _BATCH_ROWS):
                part = kept.slice(start, _BATCH_ROWS)
                yield from _texts_of_batch(part, number + start, path, text_of)
            number += len(batch)


def read_features(file: BinaryIO, path: str, *, is_parquet: bool) -> tuple[list[str], Any]:
    """Return the columns of a table, and what ``datasets`` wrote about them; None: nothing.

    Raises:
        RequestError: pyarrow is not installed.
        SourceError: It is no such file.
    """
    parquet = extra("parquet", "pyarrow.parquet", what=path)
    ipc = extra("parquet", "pyarrow.ipc", what=path)
    with _arrow_errors(path, "Parquet" if is_parquet else "Arrow"):
        if is_parquet:
            schema = parquet.read_schema(file)
        else:
            is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            file.seek(0)
            schema = (ipc.open_file(file) if is_file else ipc.open_stream(file)).schema
    written = (schema.metadata or {}).get(b"huggingface")
    try:
        about = None if written is None else parse_json(written.decode())["info"]["features"]
    except (ValueError, KeyError, TypeError):
        about = None  # of another program: columns are read all the same
    return list(schema.names), about


@contextmanager
def _arrow_errors(path: str, form: str) -> Iterator[None]:
    """Turn errors of Arrow into one that names the file.

    Args:
        form: What the file should be, for the message.
    """
    pyarrow = extra("parquet", "pyarrow", what=path)
    try:
        yield
    except pyarrow.ArrowException as error:
        raise _unreadable(path, error, form) from error
    except OSError as error:
        if error.errno is not None:  # of the file system, and none of Arrow's own
            raise
        raise _unreadable(path, error, form) from error


def _check_columns(pyarrow: Any, schema: Any, path: str, text_of: TextOf) -> list[str] | None:
    """Return the columns to read; None: all.

    Raises:
        SourceError: The column of text is missing or holds something else, or two have one name.
    """
    if text_of.whole_row is None:
        _check_column(pyarrow, schema, path, text_of.key)
        return [text_of.key]
    _check_unique_columns(schema.names, path)
    return None


def _check_column(pyarrow: Any, schema: Any, path: str, text_key: str) -> None:
    """Raise unless exactly one column has the name, and holds text."""
    names = schema.names
    if names.count(text_key) != 1:
        count = "no column" if text_key not in names else f"{names.count(text_key)} columns"
        raise SourceError(
            f"{path}: {count} {escape_text(text_key)!r} (its columns: {some_keys(names)}). "
            "data.text_key names the column that holds the text. Correct data.text_key or the "
            f"file.{chat_hint(names)}"
        )
    kind = schema.field(text_key).type
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
    table: Any, group: int, number: int, path: str, text_of: TextOf, columns: list[str] | None
) -> Iterator[TextSection]:
    """Documents of a group whose first row is ``number`` rows behind the file's first."""
    batches = table.iter_batches(
        batch_size=_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
    )
    for batch in batches:
        yield from _texts_of_batch(batch, number, path, text_of)
        number += len(batch)


def _texts_of_batch(batch: Any, number: int, path: str, text_of: TextOf) -> Iterator[TextSection]:
    """Documents of a batch whose first row is ``number`` rows behind the file's first."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError as error:
        is_whole = text_of.whole_row is not None
        which = "a column" if is_whole else f"column {escape_text(text_of.key)!r}"
        raise SourceError(
            f"{path}: {which} holds bytes that are not UTF-8 in rows {number + 1:,} to "
            f"{number + len(batch):,} ({error.reason}). Write the file again from sound text."
        ) from error
    for count, row in enumerate(rows, start=number + 1):
        place = f"{path}, row {count:,}"
        text = text_of(row, place)
        if text:
            yield TextSection(text, begins=True, ends=True, location=place)


def _unreadable(path: str, error: Exception, form: str) -> SourceError:
    why = " ".join(str(error).split())[:200].rstrip(".")
    return SourceError(
        f"{path} cannot be read as {form}: {escape_text(why)}. It is cut off, damaged, or "
        "something else by that name. Copy or write it again."
    )
