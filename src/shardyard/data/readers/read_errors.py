"""Errors of all readers in the same words: a place in a file, a package that is not installed."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

from shardyard.config.sources import is_remote
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.errors import RequestError, SourceError

Rewind = Callable[[], IO[bytes]]
"""Gives a file, unpacked, from its beginning."""

_MOST_REREAD_BYTES = 64 * 2**20
"""Most bytes of a remote file that are read again to count the lines before a wrong one."""


@dataclass(frozen=True)
class FileLocation:
    """A place in a file; its line is counted when a message asks for it."""

    file: SourceFile
    rewind: Rewind
    offset: int = 0
    """Bytes of the file before the place, or before ``text``."""
    text: str = ""
    at: int = 0
    """Characters of ``text`` before the place."""

    def __str__(self) -> str:
        path = escape_text(self.file.path)
        if is_remote(self.file.path) and self.offset > _MOST_REREAD_BYTES:
            return f"{path}, byte {self.offset:,}"
        number, left = 1 + self.text.count("\n", 0, self.at), self.offset
        content = self.rewind()
        while left > 0 and (chunk := content.read(min(left, 1 << 20))):
            number += chunk.count(b"\n")
            left -= len(chunk)
        return f"{path}:{number}"


def decode(content: bytes, location: FileLocation) -> str:
    """Text of bytes that begin at a place.

    Raises:
        SourceError: They are not UTF-8, or hold NUL.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        at = location.offset + error.start
        raise SourceError(
            f"{FileLocation(location.file, location.rewind, at)}: byte {at} of the file is not "
            "UTF-8, so this is not a text file, or is one in another encoding. Convert it (`iconv "
            "-t utf-8`) or take it out of data.source."
        ) from error
    if "\0" in text:
        at = location.offset + content.index(0)
        raise SourceError(
            f"{FileLocation(location.file, location.rewind, at)}: byte {at} of the file is NUL, so "
            "this is a binary file. Take it out of data.source."
        )
    return text


def open_rewound(file: IO[bytes]) -> IO[bytes]:
    """The same file, at its beginning."""
    file.seek(0)
    return file


def extra(name: str, *modules: str, what: str) -> Any:
    """The first of some modules that is there.

    Args:
        name: Of the extra in pyproject.toml that brings it.
        what: What needs it, to begin a sentence.

    Raises:
        RequestError: None is there; says how to install one.
    """
    for module in modules:
        try:
            return import_module(module)
        except ImportError as error:
            why = error
    raise RequestError(
        f"{what} is read with {modules[-1].partition('.')[0]}, which is not installed ({why}). "
        f"Install it: pip install 'shardyard[{name}]'"
    ) from why
