"""Batches of items in memory that readers write to and the rank reads, without a copy between.

A batch's memory is used again when no array of it is left. New memory costs more than its bytes:
the kernel clears each page at its first use, and maps it in each process.
"""

import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each array of an item, by name."""
Arrays = dict[str, npt.NDArray[Any]]


class BatchMemory(NamedTuple):
    """Shared memory of one batch."""

    number: int
    """Its name in a process and its readers."""
    rows: int
    mapped: mmap.mmap


@dataclass
class BatchMemories:
    """Memory of the batches of one rank."""

    shapes: Shapes
    _free: dict[int, list[BatchMemory]] = field(default_factory=lambda: defaultdict(list))
    """By rows; the batches' own threads return memory to it."""
    _numbers: "count[int]" = field(default_factory=count)

    def take(self, rows: int) -> tuple[BatchMemory, int | None]:
        """Return memory of a batch, and its descriptor if it is new, which the caller closes."""
        free = self._free[rows]
        if free:
            return free.pop(), None
        # It has no name in a file system, so a killed process leaves nothing behind.
        descriptor = os.memfd_create("batch")
        os.ftruncate(descriptor, size_of(self.shapes, rows))
        mapped = mmap.mmap(descriptor, size_of(self.shapes, rows))
        return BatchMemory(next(self._numbers), rows, mapped), descriptor

    def arrays(self, memory: BatchMemory) -> Arrays:
        """Return the arrays of a batch; with the last one its memory is free for another."""
        whole = np.frombuffer(memory.mapped, np.uint8)
        # Views of an array keep it, however they were made, and so do torch's tensors of them.
        weakref.finalize(whole, self._free[memory.rows].append, memory)
        return arrays_in(whole, self.shapes, memory.rows)


def map_batch(descriptor: int, shapes: Shapes, rows: int) -> Arrays:
    """Return arrays in memory that another process made."""
    mapped = mmap.mmap(descriptor, size_of(shapes, rows))
    return arrays_in(np.frombuffer(mapped, np.uint8), shapes, rows)


def size_of(shapes: Shapes, rows: int) -> int:
    """Bytes of a batch."""
    return sum(_whole_lines(dtype, (rows, *shape)) for dtype, shape in shapes.values()) or 1


def arrays_in(memory: npt.NDArray[np.uint8], shapes: Shapes, rows: int) -> Arrays:
    """Return arrays (rows, ...) that lie one after another."""
    offset, found = 0, {}
    for name, (dtype, shape) in shapes.items():
        end = offset + rows * math.prod(shape) * np.dtype(dtype).itemsize
        found[name] = memory[offset:end].view(dtype).reshape(rows, *shape)
        offset += _whole_lines(dtype, (rows, *shape))
    return found


def _whole_lines(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, in whole cache lines."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64
