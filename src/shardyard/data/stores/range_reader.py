"""Files that are read by ranges over a network: found like those of folders, read as if local.

A connection that breaks is gone on with where it broke, a bounded number of times.
"""

import io
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from shardyard.config.sources import MAGIC, count_literal, escape_hint, has_magic
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import ListedFile, is_hidden
from shardyard.errors import LostError, RequestError, SourceError
from shardyard.io.polling import backoff_s

_LEAST_BYTES = 256 * 1024
"""Asked for at once where reading begins, as much as the beginning of a file takes to check."""
_MOST_BYTES = 8 * 2**20
"""Asked for at once where a file is read on and on."""
_TRIES = 6
"""Number of consecutive tries without any data before a read is given up."""
_LONGEST_PAUSE_S = 20.0
_LONGEST_SILENCE_S = 30.0
"""Longest time without a byte, for any number of tries: each takes long if a server stalls."""

ReadRange = Callable[[SourceFile, int, int], Iterator[bytes]]
"""(file, start, stop) -> its bytes [start, stop), fewer if the connection broke in silence.

Raises LostError if it broke, and ``changed`` if the file is of another version.
"""


_MAGIC = re.compile(f"[{re.escape(MAGIC)}]")


class RangedStore(ABC):
    """Finds files by names that are folders only by their slashes, and reads them by ranges."""

    @abstractmethod
    def stat(self, url: str) -> ListedFile | None:
        """The file of this very address, if there is one."""

    @abstractmethod
    def below(self, prefix: str) -> Iterator[ListedFile]:
        """All files whose addresses begin so, named by their whole address, in any order."""

    @abstractmethod
    def read(self, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        """Read a range, as defined by ``ReadRange``."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[ListedFile]:  # noqa: ARG002
        """Find files of an address, of a folder, or of a glob, in the order of their names.

        Raises:
            RequestError: There are none.
        """
        bucket = entry.split("/")[2] if entry.count("/") >= 2 else entry
        if has_magic(bucket):
            raise RequestError(
                f"data.source={escape_text(entry)!r} has a wildcard in the name of a bucket or "
                "host, and those cannot be listed. Write the name, and wildcards behind it."
            )
        is_folder = entry.endswith("/")
        found = None if is_folder else retry_on_disconnect(lambda: self.stat(entry))
        if found is not None:
            yield replace(found, name=entry.rpartition("/")[2], below="")
            return
        literal, pattern = self._split(entry.rstrip("/"))
        named = self._matches(entry, literal, pattern) if pattern else self._inside(literal)
        if not named:
            raise RequestError(
                f"data.source={escape_text(entry)!r} does not exist: there is neither a file of "
                "that name nor one below it that is not hidden. Correct the address."
            )
        for name, below, each in sorted(named, key=lambda row: row[:2]):
            yield replace(each, name=name, below=below, pattern=pattern)

    def _split(self, entry: str) -> tuple[str, str]:
        """The literal part of an address, and the pattern below it; empty: there is none."""

        def exists(name: str) -> bool:
            folder = f"{name}/"
            return retry_on_disconnect(lambda: next(iter(self.below(folder)), None)) is not None

        parts = entry.split("/")
        count = 3 + count_literal(parts[3:], lambda name: exists("/".join((*parts[:3], name))))
        return "/".join(parts[:count]), "/".join(parts[count:])

    def _matches(self, entry: str, literal: str, pattern: str) -> list[tuple[str, str, ListedFile]]:
        matches = matcher(pattern)
        begins = f"{literal}/{_MAGIC.split(pattern, maxsplit=1)[0]}"
        found = retry_on_disconnect(lambda: [*self.below(begins)])
        named = [(each.path, each.path.removeprefix(f"{literal}/"), each) for each in found]
        named = [row for row in named if matches(row[1])]
        if not named:
            raise RequestError(
                f"data.source={escape_text(entry)!r}: no file matches {escape_text(pattern)!r} in "
                f"{escape_text(literal)}. Correct the pattern, or take it "
                f"out.{escape_hint(pattern)}"
            )
        return named

    def _inside(self, literal: str) -> list[tuple[str, str, ListedFile]]:
        """Files below a folder; hidden ones are left out."""
        found = retry_on_disconnect(lambda: [*self.below(f"{literal}/")])
        named = [(each.path.removeprefix(f"{literal}/"), each) for each in found]
        return [(name, name, each) for name, each in named if name and not is_hidden(name)]

    def open(self, file: SourceFile) -> BinaryIO:
        """A file to read and seek in; bytes are asked for when they are read."""
        return cast(BinaryIO, io.BufferedReader(RangedFile(file, self.read)))


T = TypeVar("T")


def retry_on_disconnect(ask: Callable[[], T]) -> T:
    """Return the answer of a remote store, retrying where the connection broke.

    Raises:
        LostError: It breaks each time.
    """
    began_s = time.monotonic()
    for in_vain in range(1, _TRIES):
        try:
            return ask()
        except LostError:
            if _is_silent_since(began_s):
                raise
            _pause(in_vain)
    return ask()


def _is_silent_since(started_s: float) -> bool:
    return time.monotonic() - started_s >= _LONGEST_SILENCE_S


def _pause(in_vain: int, sleep: Callable[[float], None] = time.sleep) -> None:
    sleep(backoff_s(in_vain, first_s=0.25, longest_s=_LONGEST_PAUSE_S))


class _Block(NamedTuple):
    start: int
    content: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.content)


class RangedFile(io.RawIOBase):
    """One file, of which ranges are asked for as they are read.

    The last two answers are kept: readers step back a little, and a section must not be sent twice.
    """

    def __init__(
        self, file: SourceFile, read: ReadRange, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._file = file
        self._read_range = read
        self._sleep = sleep
        self._at = 0
        self._blocks: list[_Block] = []
        self._ask_bytes = _LEAST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, into: "bytearray | memoryview") -> int:  # type: ignore[override]
        """Fill a buffer, as far as the file and one answer reach.

        Raises:
            LostError: No more data comes.
            SourceError: The file is of another version now.
        """
        if self._at >= self._file.size_bytes:
            return 0
        held = (block for block in self._blocks if block.start <= self._at < block.stop)
        block = next(held, None) or self._next_block(len(into))
        offset = self._at - block.start
        part = memoryview(block.content)[offset : offset + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _next_block(self, min_bytes: int) -> _Block:
        """Read the next block; it is larger the longer reading continues without a jump."""
        goes_on = any(block.stop == self._at for block in self._blocks)
        self._ask_bytes = min(2 * self._ask_bytes, _MOST_BYTES) if goes_on else _LEAST_BYTES
        stop = min(self._at + max(min_bytes, self._ask_bytes), self._file.size_bytes)
        block = _Block(self._at, self._whole(self._at, stop))
        self._blocks = [*self._blocks[-1:], block]
        return block

    def _whole(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), gone on with where a connection broke."""
        got = bytearray()
        in_vain, heard_s = 0, time.monotonic()
        while True:
            before = len(got)
            lost: LostError | None = None
            try:
                for part in self._read_range(self._file, start + before, stop):
                    got += part
            except LostError as error:
                lost = error
            if len(got) == stop - start:
                return bytes(got)
            if len(got) > stop - start:
                raise changed(self._file, "more bytes came than were asked for")
            if len(got) > before:
                in_vain, heard_s = 0, time.monotonic()
                continue
            in_vain += 1
            if in_vain == _TRIES or _is_silent_since(heard_s):
                raise lost or LostError(
                    f"{escape_text(self._file.path)}: connections end before any byte comes, "
                    f"{in_vain} times in a row. {READ_AGAIN}"
                )
            _pause(in_vain, self._sleep)


READ_AGAIN = "Check the network, then prepare again: finished pieces are kept."


def changed(file: SourceFile, reason: str) -> SourceError:
    """The error for a file that is not the one that was listed.

    Args:
        reason: What shows it.
    """
    return SourceError(
        f"{escape_text(file.path)} changed since it was listed: {reason}. Its tokens would mix old "
        "and new text. Prepare again when no other process writes there."
    )


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether an address fits a glob: ``*`` and ``?`` stay in one folder, ``**`` goes through any.

    As in folders, a wildcard at the beginning of a name fits no hidden one.
    """
    parts = []
    for part in pattern.split("/"):
        if part == "**":
            parts.append(r"(?:[^/.][^/]*/)*")
        else:
            hidden = r"(?!\.)" if part[:1] in ("*", "?", "[") else ""
            parts.append(hidden + _part(part) + "/")
    return lambda text: re.fullmatch("".join(parts), f"{text}/") is not None


def _part(part: str) -> str:
    """One name of a glob as a regular expression."""
    found, at = "", 0
    while at < len(part):
        end = part.find("]", at + 2)
        if part[at] == "[" and end > 0:
            inside = part[at + 1 : end].replace("\\", r"\\").replace("[", r"\[")
            negated = inside[:1] in ("!", "^")
            found += f"[{'^/' if negated else ''}{inside[1:] if negated else inside}]"
            at = end + 1
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(part[at], re.escape(part[at]))
            at += 1
    return found
