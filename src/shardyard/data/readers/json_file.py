"""A .json file: a list of objects, or objects one after the other, read as a whole."""

import codecs
import json
import re
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, BinaryIO

from shardyard.data.byte_ranges import Section, Span, shown
from shardyard.data.readers.json_values import DECODER, not_json
from shardyard.data.readers.read_errors import Place, decode, rewound
from shardyard.data.readers.rows import TextOf
from shardyard.errors import SourceError

MOST_BYTES = 2**30
"""A file is held in memory, so one above this is refused."""


def read_json_file(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[Section]:
    """A list of objects, or objects one after the other: one object, or JSON lines by this name."""
    if span.stop > MOST_BYTES:
        raise SourceError(
            f"{shown(span.file.path)} has {span.stop:,} bytes, and a .json file is read whole, up "
            f"to {MOST_BYTES:,}. Write one object a line into a .jsonl file, as "
            "`jq -c '.[]' FILE.json > FILE.jsonl` does for a list; if it is written so already, "
            "rename it."
        )
    rewind = partial(rewound, file)
    raw = file.read(span.stop).removeprefix(codecs.BOM_UTF8)
    content = decode(raw, Place(span.file, rewind))
    try:
        for at, row in _json_values(content):
            place = Place(span.file, rewind, text=content, at=at)
            text = text_of(row, place)
            if text:
                yield Section(text, begins=True, ends=True, place=place)
    except json.JSONDecodeError as error:
        form = "A .json file holds a list of objects, or objects one after the other."
        place = Place(span.file, rewind, text=content, at=error.pos)
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
    """As ``_json_values``, of the list that begins at ``at``; returns where the text goes on."""
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
