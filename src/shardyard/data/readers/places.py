"""Where in a file something is wrong, and the same words for it in every reader."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from shardyard.config.sources import is_remote
from shardyard.data.spans import SourceFile, shown
from shardyard.errors import SourceError

Rewind = Callable[[], IO[bytes]]
"""Gives a file, unpacked, from its beginning."""

_MOST_REREAD_BYTES = 64 * 2**20
"""Of a file that is far away: lines before a wrong one are counted by reading them again."""


@dataclass(frozen=True)
class Place:
    """A place in a file; its line is counted when a message asks for it."""

    file: SourceFile
    rewind: Rewind
    offset: int = 0
    """Bytes of the file before the place, or before ``text``."""
    text: str = ""
    at: int = 0
    """Characters of ``text`` before the place."""

    def __str__(self) -> str:
        path = shown(self.file.path)
        if is_remote(self.file.path) and self.offset > _MOST_REREAD_BYTES:
            return f"{path}, byte {self.offset:,}"
        number, left = 1 + self.text.count("\n", 0, self.at), self.offset
        content = self.rewind()
        while left > 0 and (chunk := content.read(min(left, 1 << 20))):
            number += chunk.count(b"\n")
            left -= len(chunk)
        return f"{path}:{number}"


def decode(content: bytes, place: Place) -> str:
    """Text of bytes that begin at a place.

    Raises:
        SourceError: They are not UTF-8, or hold NUL.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        at = place.offset + error.start
        raise SourceError(
            f"{Place(place.file, place.rewind, at)}: byte {at} of the file is not UTF-8, so this "
            "is no text file or one in another encoding. Convert it (`iconv -t utf-8`) or take it "
            "out of data.source."
        ) from error
    if "\0" in text:
        at = place.offset + content.index(0)
        raise SourceError(
            f"{Place(place.file, place.rewind, at)}: byte {at} of the file is NUL, so this is a "
            "binary file. Take it out of data.source."
        )
    return text


def text_of(row: Any, place: object, text_key: str) -> str:
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
        found = f"no key {shown(text_key)!r} (its keys: {some_keys(row)})"
    raise SourceError(
        f"{place}: {found}. data.text_key names the key that holds the text. "
        "Correct data.text_key or the line."
    )


def _refuse_surrogates(text: str, place: object, text_key: str) -> None:
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


def some_keys(keys: Any) -> str:
    """The first few of them."""
    named = [shown(key[:40]) for key in sorted(keys)]
    more = f", and {len(named) - 8} more" if len(named) > 8 else ""
    return (", ".join(named[:8]) + more) or "none"


def rewound(file: IO[bytes]) -> IO[bytes]:
    """The same file, at its beginning."""
    file.seek(0)
    return file
