"""Bytes of pictures, read block by block into a bounded cache, ahead of their use.

A block is as many neighbours as the order keeps together (``Window.block``); what lies close is
read at once. Where two windows do not fit the cache, pictures are read one by one instead: a block
would be dropped before it was used. Threads share what is read, and none waits for another's block.
"""

import os
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np

from shardyard.config.sources import is_remote
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.index import ImageIndex, Rows
from shardyard.data.stores.base import open_file
from shardyard.errors import DataError

_GAP_BYTES = 64 * 1024
"""Read over where two pictures are no further apart: another request costs more."""
_READERS = 8


class _Segment(NamedTuple):
    """Bytes of a part of the data set, from ``start`` on."""

    part: int
    start: int
    content: bytes


class _Block(NamedTuple):
    segments: tuple[_Segment, ...]
    keys: tuple[tuple[int, int], ...]
    """(part, start) of each, ascending."""
    size_bytes: int

    def content(self, part: int, offset: int, size: int) -> memoryview:
        segment = self.segments[bisect_right(self.keys, (part, offset)) - 1]
        begin = offset - segment.start
        return memoryview(segment.content)[begin : begin + size]


class ImageBytes:
    """The bytes of any picture of a split. Safe to use from several threads."""

    def __init__(self, index: ImageIndex, cache_bytes: int) -> None:
        self.index = index
        self.read_bytes = 0
        """Read so far, from disk or elsewhere."""
        self.wait_s = 0.0
        """Seconds that all threads waited for bytes of pictures that they asked for."""
        self.num_reads = 0
        """Times that something was asked for."""
        window_bytes = index.window.samples * index.size_bytes / max(1, index.num_samples)
        fits = 2 * min(window_bytes, index.size_bytes) <= cache_bytes
        self._block = index.window.block if fits else 1
        self._is_cached = self._block > 1
        self._cache_bytes = cache_bytes
        self._lock = Lock()
        self._blocks: OrderedDict[int, Future[_Block]] = OrderedDict()
        self._used_bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def prefetch(self, samples: Iterable[int]) -> None:
        """Begin to read what these pictures need, in this order."""
        if not self._is_cached and not self.index.is_remote:
            return  # who decodes reads: a file of this machine needs no thread of its own
        for number in dict.fromkeys(sample // self._block for sample in samples):
            self._future(number)

    def content(self, sample: int) -> memoryview:
        """The bytes of a picture.

        Raises:
            DataError: A file is not as it was when it was prepared.
            LostError: The network is.
        """
        row = self.index.rows[sample]
        began_s = time.perf_counter()
        if not self._is_cached and not self.index.is_remote:
            block = self._read(sample)
        else:
            block = self._future(sample // self._block).result()
        self.wait_s += time.perf_counter() - began_s
        return block.content(int(row["part"]), int(row["offset"]), int(row["size"]))

    def _future(self, number: int) -> "Future[_Block]":
        with self._lock:
            found = self._blocks.get(number)
            if found is not None and not (found.done() and found.exception()):
                self._blocks.move_to_end(number)
                return found
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="pictures")
            asked = self._pool.submit(self._read_and_count, number)
            self._blocks[number] = asked
            return asked

    def _read_and_count(self, number: int) -> _Block:
        block = self._read(number)
        with self._lock:
            self._used_bytes += block.size_bytes
            self._evict()
        return block

    def _evict(self) -> None:
        """Let go of what was used longest ago, as far as there is too much."""
        for number in list(self._blocks):
            if self._used_bytes <= self._cache_bytes:
                return
            held = self._blocks[number]
            if held.done():
                del self._blocks[number]
                self._used_bytes -= 0 if held.exception() else held.result().size_bytes

    def _read(self, number: int) -> _Block:
        first = number * self._block
        rows = self.index.rows[first : first + self._block]
        if int(rows["part"][0]) < 0:
            place = self.index.location(first)
            segments = [_Segment(-1, 0, self._bytes(place.file, 0, place.size, first))]
        else:
            segments = [
                _Segment(part, start, self._bytes(self.index.part(part), start, stop, first))
                for part, start, stop in _ranges(rows)
            ]
        size_bytes = sum(len(segment.content) for segment in segments)
        self.read_bytes += size_bytes
        self.num_reads += len(segments)
        keys = tuple((segment.part, segment.start) for segment in segments)
        return _Block(tuple(segments), keys, size_bytes)

    def _bytes(self, file: SourceFile, start: int, stop: int, sample: int) -> bytes:
        try:
            content = _range(file, start, stop)
        except OSError as error:
            raise self._not_as_prepared(file, sample, error.strerror or str(error)) from error
        if len(content) != stop - start:
            raise self._not_as_prepared(file, sample, "its size is another one")
        return content

    def _not_as_prepared(self, file: SourceFile, sample: int, reason: str) -> DataError:
        return DataError(
            f"{escape_text(file.path)} is not as it was when it was prepared: {reason} (needed for "
            f"{self.index.describe(sample)}). Bring it back, or delete {self.index.folder} and "
            "prepare again."
        )


def _ranges(rows: Rows) -> list[tuple[int, int, int]]:
    """(part, start, stop) of what is read at once, ascending."""
    ranges: list[tuple[int, int, int]] = []
    for row in rows if len(rows) == 1 else np.sort(rows, order=["part", "offset"]):
        part, start, size = int(row["part"]), int(row["offset"]), int(row["size"])
        if ranges and ranges[-1][0] == part and start <= ranges[-1][2] + _GAP_BYTES:
            ranges[-1] = (part, ranges[-1][1], max(ranges[-1][2], start + size))
        else:
            ranges.append((part, start, start + size))
    return ranges


def _range(file: SourceFile, start: int, stop: int) -> bytes:
    if is_remote(file.path):
        with open_file(file) as opened:
            opened.seek(start)
            return opened.read(stop - start)
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size != file.size_bytes:
            return b""
        return os.pread(descriptor, stop - start, start)
    finally:
        os.close(descriptor)
