"""How a file becomes documents: one row a format, chosen by the suffix of the file's name.

A reader gets an open file and the part of it that is its own. It never guesses: what it cannot
read is refused with file and line. Which files there are is decided in ``sources.py``.
"""

import codecs
import json
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from shardyard.errors import SourceError

SECTION_BYTES = 64 * 1024
"""A text file above this is read in sections of about this size. Sections are held out
one by one, so that a corpus of one book has a held-out part too."""
MOST_JSON_BYTES = 2**30
"""A .json file is read whole, so one above this is refused."""
_UTF8_CONTINUATION = bytes(range(0x80, 0xC0))


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin in bytes [start, stop)."""

    path: str
    format: str
    """A key of ``FORMATS``."""
    start: int
    stop: int
    is_last: bool
    """Whether the file ends here."""


@dataclass(frozen=True)
class Section:
    """A document, or a part of a long one."""

    text: str
    begins: bool
    """Whether the document begins here; if not, it goes on from the section before."""
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write documents into a file."""

    suffixes: tuple[str, ...]
    """In lower case; case does not matter."""
    read: Callable[[BinaryIO, Span, str], Iterator[Section]]
    """(file, span, data.text_key) -> the documents that begin in the span."""
    has_keys: bool
    """Whether the text stands under data.text_key."""
    is_divisible: bool
    """Whether a span may begin and end anywhere; if not, it is the whole file."""


def shown(text: str) -> str:
    """A file's own words in a message: what is no visible character is written as its escape."""
    return text if text.isprintable() else repr(text)[1:-1]


def _read_text(file: BinaryIO, span: Span, _text_key: str) -> Iterator[Section]:
    for start in range(span.start, span.stop, SECTION_BYTES):
        stop = min(start + SECTION_BYTES, span.stop)
        first_byte, end_byte = _section_border(file, start), _section_border(file, stop)
        file.seek(first_byte)
        content = file.read(end_byte - first_byte)
        if start == 0:
            content = content.removeprefix(codecs.BOM_UTF8)
        text = _decode(content, span.path, first_byte)
        if text:
            yield Section(text, begins=start == 0, ends=span.is_last and stop == span.stop)


def _section_border(file: BinaryIO, offset: int) -> int:
    """Where a section that should end at ``offset`` ends: after the next line end, else space,
    within the bytes of one section, else before the next character."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    window = file.read(SECTION_BYTES)
    for separator in (b"\n", b" "):
        found = window.find(separator)
        if found >= 0:
            return offset + found
    rest = window[1:]
    return offset + len(rest) - len(rest.lstrip(_UTF8_CONTINUATION))


def _read_json_lines(file: BinaryIO, span: Span, text_key: str) -> Iterator[Section]:
    file.seek(max(0, span.start - 1))
    if span.start:
        file.readline()  # the line in progress belongs to the span before
    offset = file.tell()
    while offset < span.stop and (line := file.readline()):
        if line.strip():
            content = line.removeprefix(codecs.BOM_UTF8).rstrip()
            decoded = _decode(content, span.path, offset)
            place = _Place(span.path, offset)
            try:
                row = _DECODER.decode(decoded)
            except json.JSONDecodeError as error:
                raise _not_json(place, error, "Each line of this file is one object.") from error
            text = _text_of(row, place, text_key)
            if text:
                yield Section(text, begins=True, ends=True)
        offset += len(line)


def _read_json(file: BinaryIO, span: Span, text_key: str) -> Iterator[Section]:
    """A list of objects, or objects one after the other: one object, or JSON lines by this name."""
    if span.stop > MOST_JSON_BYTES:
        raise SourceError(
            f"{shown(span.path)} has {span.stop:,} bytes, and a .json file is read whole, up to "
            f"{MOST_JSON_BYTES:,}. Write one object a line into a .jsonl file, as "
            "`jq -c '.[]' FILE.json > FILE.jsonl` does for a list; if it is written so already, "
            "rename it."
        )
    content = _decode(file.read(span.stop).removeprefix(codecs.BOM_UTF8), span.path, 0)
    try:
        for at, row in _json_values(content):
            text = _text_of(row, _Place(span.path, text=content, at=at), text_key)
            if text:
                yield Section(text, begins=True, ends=True)
    except json.JSONDecodeError as error:
        form = "A .json file holds a list of objects, or objects one after the other."
        place = _Place(span.path, text=content, at=error.pos)
        raise _not_json(place, error, form) from error


_SPACE = re.compile(r"[ \t\r\n]*")


def _json_values(text: str) -> Iterator[tuple[int, Any]]:
    """(where it begins, value) of each item of a list, and of each value outside of lists."""
    at = _after_space(text, 0)
    while at < len(text):
        if text[at] == "[":
            at = yield from _json_items(text, at)
        else:
            value, end = _DECODER.raw_decode(text, at)
            yield at, value
            at = _after_space(text, end)


def _json_items(text: str, at: int) -> Generator[tuple[int, Any], None, int]:
    """As ``_json_values``, of the list that begins at ``at``; returns where the text goes on."""
    at = _after_space(text, at + 1)
    if text.startswith("]", at):
        return _after_space(text, at + 1)
    while True:
        value, end = _DECODER.raw_decode(text, at)
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


_MOST_DIGITS = 4000
"""Python refuses to read longer integers, as that takes quadratic time."""


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


class _Decoder(json.JSONDecoder):
    """As Python's own; what it can parse no further is no JSON for us."""

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        try:
            return super().raw_decode(s, idx)
        except RecursionError as error:
            why = "Lists or objects in one another, deeper than can be read"
            raise json.JSONDecodeError(why, s, idx) from error


_DECODER = _Decoder(parse_int=_whole_number)


@dataclass(frozen=True)
class _Place:
    """A place in a file; its line is counted when a message asks for it."""

    path: str
    offset: int = 0
    """Bytes of the file before the place, or before ``text``."""
    text: str = ""
    at: int = 0
    """Characters of ``text`` before the place."""

    def __str__(self) -> str:
        number, left = 1 + self.text.count("\n", 0, self.at), self.offset
        with Path(self.path).open("rb") as file:
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{shown(self.path)}:{number}"


def _not_json(place: _Place, error: json.JSONDecodeError, form: str) -> SourceError:
    return SourceError(
        f"{place}: not JSON ({error.msg}, column {error.colno:,}). {form} Mend or remove the line."
    )


def _text_of(row: Any, place: _Place, text_key: str) -> str:
    """The text of a row.

    Raises:
        SourceError: It has none, or holds what is no character.
    """
    text = row.get(text_key) if isinstance(row, dict) else None
    if isinstance(text, str):
        _refuse_surrogates(text, place, text_key)
        return text
    if not isinstance(row, dict):
        found = f"{_kind(row)}, not an object"
    elif text_key in row:
        found = f"{shown(text_key)!r} holds {_kind(row[text_key])}, not a string"
    else:
        found = f"no key {shown(text_key)!r} (its keys: {_some_keys(row)})"
    raise SourceError(
        f"{place}: {found}. data.text_key names the key that holds the text. "
        "Correct data.text_key or the line."
    )


def _refuse_surrogates(text: str, place: _Place, text_key: str) -> None:
    """JSON can write half of a pair that stands for one character; no encoding has such a half."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{place}: {shown(text_key)!r} holds \\u{ord(text[error.start]):04x} as its character "
            f"{error.start + 1:,}: half of a surrogate pair, which is no character. Its other half "
            "is missing, as when a text was cut in the middle of it. Mend or remove the line."
        ) from error


def _kind(value: Any) -> str:
    """What a JSON value is, in a few words."""
    if isinstance(value, list | dict):
        return f"a JSON {type(value).__name__}"
    if isinstance(value, str):
        return "a JSON string"
    return json.dumps(value)[:40]


def _some_keys(row: dict[str, Any]) -> str:
    keys = [shown(key[:40]) for key in sorted(row)]
    more = f", and {len(keys) - 8} more" if len(keys) > 8 else ""
    return (", ".join(keys[:8]) + more) or "none"


def _decode(content: bytes, path: str, offset: int) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{_Place(path, offset + error.start)}: byte {offset + error.start} of the file is not "
            "UTF-8, so this is no text file or one in another encoding. Convert it "
            "(`iconv -t utf-8`) or take it out of data.source."
        ) from error
    if "\0" in text:
        at = offset + content.index(0)
        raise SourceError(
            f"{_Place(path, at)}: byte {at} of the file is NUL, so this is a binary file. "
            "Take it out of data.source."
        )
    return text


FORMATS: dict[str, Format] = {
    "text": Format(
        suffixes=(
            ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".log",
            ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh",
            ".java", ".kt", ".scala", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb",
            ".php", ".pl", ".pm", ".lua", ".jl", ".r", ".m", ".swift", ".cs", ".fs", ".hs", ".ml",
            ".ex", ".exs", ".erl", ".clj", ".el", ".f90", ".sh", ".bash", ".sql",
        ),
        read=_read_text,
        has_keys=False,
        is_divisible=True,
    ),
    "jsonl": Format(
        suffixes=(".jsonl", ".ndjson"), read=_read_json_lines, has_keys=True, is_divisible=True
    ),
    "json": Format(suffixes=(".json",), read=_read_json, has_keys=True, is_divisible=False),
}  # fmt: skip
"""Name -> format; a suffix belongs to one of them."""

_BY_SUFFIX = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes}

_UNPACK = "unpack it first (gunzip, zstd -d, unzip, tar -x)"
_TABLE = (
    "turn it into JSON lines first, such as with pandas: "
    "`read_parquet(...)` or `read_csv(...)`, then `.to_json(FILE.jsonl, orient='records', "
    "lines=True)`"
)
_EXTRACT = "take its text out first"
_OTHERS: dict[str, str] = {
    **dict.fromkeys((".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4"), _UNPACK),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".csv", ".tsv", ".xlsx"), _TABLE),
    **dict.fromkeys((".pdf", ".docx", ".odt", ".epub", ".html", ".htm", ".xml"), _EXTRACT),
}
"""Kinds that hold text which is not read yet -> what to do about it."""


def format_of(name: str, data_format: str) -> str | None:
    """The format of a file by its name; None: it has none that is known.

    Args:
        data_format: ``data.format``: with ``text``, what is of no known kind is plain text.
    """
    known = _BY_SUFFIX.get(PurePath(name).suffix.lower())
    return "text" if known is None and data_format == "text" else known


def remedy_of(name: str) -> str:
    """What to do about a file without a format."""
    suffix = PurePath(name).suffix.lower()
    return _OTHERS.get(suffix, "if it is plain text, set data.format=text")
