"""Rows of a task's data files, with the columns and types that ``datasets`` gives them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardyard.data.eval_tasks.task import EvalTask, Row
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.errors import RequestError
from shardyard.io.files import parse_json

_PIECE_BYTES = 2**26
_TABLES = ("csv", "tsv")


def row_json(row: Any, location: object) -> str:
    """Return a row as JSON, so that readers of documents read it.

    Raises:
        RequestError: It is no object, or holds values that JSON has not.
    """
    if not isinstance(row, dict):
        raise RequestError(f"{location}: a row of a task must be an object with named values.")
    try:
        return json.dumps(row)
    except TypeError as error:
        raise RequestError(f"{location}: {error}. Write the row as text and numbers.") from error


def read_rows(task: EvalTask, split: str) -> list[Row]:
    """Return all rows of a split. Each has every column; a missing value is None.

    Raises:
        RequestError: A file is missing, or its rows are not objects.
        SourceError: A file cannot be read.
    """
    sources = [_found(path, task.folder) for path in task.data_files[split]]
    text_of = TextOf(whole_row="shardyard.data.eval_tasks.rows:row_json")
    rows: list[Row] = []
    for source in sources:
        files = list_files(source, setting=f"data_files of task {task.name}")
        found = [
            parse_json(section.text)
            for piece in split_into_pieces(files, _PIECE_BYTES)
            for section in read_sections(piece, text_of)
        ]
        rows += _typed(found) if any(each.format in _TABLES for each in files) else found
    if not rows:
        raise RequestError(f"task {task.name}: split {split!r} has no rows.")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [{column: row.get(column) for column in columns} for row in rows]


def read_documents(source: str, text_key: str) -> Iterator[str]:
    """Yield the documents of files of text, as ``data.source`` names them."""
    files = list_files(source, setting="--text")
    parts: list[str] = []
    for piece in split_into_pieces(files, _PIECE_BYTES):
        for section in read_sections(piece, TextOf(key=text_key)):
            if section.begins and parts:
                yield "".join(parts)
                parts = []
            parts.append(section.text)
            if section.ends:
                yield "".join(parts)
                parts = []
    if parts:
        yield "".join(parts)


def _found(path: str, folder: Path) -> str:
    """Path of a data file: below the task's folder, else from the current folder."""
    below = folder / path
    return str(below) if "://" not in path and below.exists() else path


def _typed(rows: Sequence[Row]) -> list[Row]:
    """Give columns of a table the type that all their values have: CSV has only text."""
    columns = {key: [row.get(key) for row in rows] for row in rows[:1] for key in row}
    typed = {key: _values(values) for key, values in columns.items()}
    return [{key: values[row] for key, values in typed.items()} for row in range(len(rows))]


def _values(texts: Sequence[Any]) -> list[Any]:
    given = [text for text in texts if text not in ("", None)]
    for convert in (int, float, _truth):
        try:
            converted = {text: convert(text) for text in given}
        except ValueError:
            continue
        return [converted.get(text) for text in texts]
    return [text or None for text in texts]


def _truth(text: str) -> bool:
    if text not in ("True", "False", "true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
