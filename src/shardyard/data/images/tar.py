"""Tar files with random access: the places of their members, and how ours are written.

Files with ustar, pax and GNU headers are read, as Python's tarfile does. It takes a damaged
header for the end of the file, so what is behind the last member is checked here. Files are
written as ustar; the same members give the same bytes.
"""

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import open_file
from shardyard.errors import SourceError

_BLOCK = 512
_END = 2 * _BLOCK
_AGAIN = "Copy or write it again, or take it out of data.source."


@dataclass(frozen=True)
class Member:
    """A file in a tar file: its bytes are [offset, offset + size)."""

    name: str
    offset: int
    size: int


def members(file: BinaryIO, path: str) -> Iterator[Member]:
    """Regular files of a tar file, in its order; folders are left out.

    Args:
        path: For messages.

    Raises:
        SourceError: It is no tar file, cut off, damaged, or holds links.
    """
    where = escape_text(path)
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else all are kept in memory
                end = tar.offset
                if info.isdir():
                    continue
                if not info.isreg() or info.issparse():
                    raise SourceError(
                        f"{where}: member {escape_text(info.name)} is a link or no plain file, "
                        "whose "
                        "content is elsewhere. Write the tar file with its content (`tar -h`)."
                    )
                yield Member(info.name, info.offset_data, info.size)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise _damaged(where, end, " ".join(str(error).split())) from error
    _check_end(file, where, end)


def _check_end(file: BinaryIO, where: str, end: int) -> None:
    """Raise unless there are only zeros behind the last member."""
    file.seek(end)
    rest = file.read(_END)
    if len(rest) < _BLOCK:
        raise SourceError(
            f"{where} is cut off: at byte {end:,} it ends without a tar file's end. {_AGAIN}"
        )
    if any(rest):
        raise _damaged(where, end, "the bytes there are not a header")
    while rest := file.read(2**20):
        if any(rest):
            raise SourceError(
                f"{where} continues behind its end at byte {end:,}: tar files were joined with "
                "`cat`, and most programs read only the first. Give them one by one."
            )


def _damaged(where: str, offset: int, reason: str) -> SourceError:
    return SourceError(
        f"{where} is damaged or cut off at byte {offset:,}: "
        f"{escape_text(reason[:160].rstrip('.'))}. {_AGAIN}"
    )


class TarWriter:
    """Writes members one behind the other."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write_on = write
        self.size_bytes = 0
        """Written so far."""

    def add(self, name: str, content: bytes) -> int:
        """Append a file; returns the offset of its content."""
        info = tarfile.TarInfo(name)
        info.size = len(content)
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        offset = self.size_bytes
        self._write(content)
        self._write(bytes(-len(content) % _BLOCK))
        return offset

    def close(self) -> None:
        """Write the end."""
        self._write(bytes(_END))

    def _write(self, content: bytes) -> None:
        self._write_on(content)
        self.size_bytes += len(content)


# Files that lie by themselves, or in a tar file.


@dataclass(frozen=True, slots=True)
class InTar(SourceFile):
    """A member of a tar file: its path says both, for messages."""

    tar: SourceFile = field(kw_only=True)
    offset: int = field(kw_only=True)
    """Offset of its content in the tar file."""


def content_of(file: SourceFile) -> bytes:
    """The whole content of a file.

    Raises:
        SourceError: It cannot be read, or is shorter than it was.
    """
    try:
        if not isinstance(file, InTar):
            with open_file(file) as opened:
                return opened.read()
        with open_file(file.tar) as opened:
            opened.seek(file.offset)
            content = opened.read(file.size_bytes)
    except OSError as error:
        raise SourceError(
            f"{escape_text(file.path)} cannot be read: {error.strerror or error}. Check that it is "
            "there and readable, or take it out of data.source."
        ) from error
    if len(content) != file.size_bytes:
        raise SourceError(f"{escape_text(file.path)} changed while it was read. Prepare again.")
    return content
