"""Threads that decode: as many as a measured rate asks for.

Threads, not processes: Pillow lets others run while it decodes, pictures need not be copied from
one process into another, and nothing is left behind when this process is killed.
"""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardyard.cpu_quota import usable_cores

T = TypeVar("T")

_MEASURED_S = 2.0
_SATURATED = 0.9
"""Share of the threads at work from which on pictures are asked for quicker than they come."""
_SPARE = 1.25
"""More threads than were busy: the rate of a step varies."""


def decode_threads(wanted: int | str) -> "DecodeThreads":
    """The threads that ``data.images.threads`` asks for."""
    if isinstance(wanted, int):
        return DecodeThreads(wanted)
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = max(1, usable_cores() // processes_here)
    return DecodeThreads(cores, is_fixed=False)


class DecodeThreads:
    """Does the same work for many numbers, in several threads. Several callers may use it."""

    def __init__(self, threads: int, *, is_fixed: bool = True) -> None:
        """Args:
        threads: At most.
        is_fixed: Whether it is that many; else as many as were busy lately, and some more.
        """
        self.threads = threads
        self.busy_s = 0.0
        """Of all threads together, so far."""
        self.saturated_s = 0.0
        """Seconds until now in which hardly any of them waited for work."""
        self._most = threads
        self._is_fixed = is_fixed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._since_s = time.perf_counter()
        self._busy_before_s = 0.0

    def run(self, work: Callable[[int], T], count: int) -> list[T]:
        """What ``work`` makes of 0 to ``count`` - 1; raises the first that it raises."""
        numbers = iter(range(count))
        made: dict[int, T] = {}

        def take() -> float:
            began_s = time.perf_counter()
            for number in numbers:  # one iterator for all: each number is taken once
                made[number] = work(number)
            return time.perf_counter() - began_s

        loops = [self._pool.submit(take) for _ in range(min(self.threads, count))]
        try:
            self.busy_s += sum(loop.result() for loop in loops)
        finally:
            for _ in numbers:  # after an error: nothing more is begun
                pass
        self._measure()
        return [made[number] for number in range(count)]

    def _measure(self) -> None:
        elapsed_s = time.perf_counter() - self._since_s
        if elapsed_s < _MEASURED_S:
            return
        busy = (self.busy_s - self._busy_before_s) / elapsed_s
        self.saturated_s = self.saturated_s + elapsed_s if busy > _SATURATED * self._most else 0.0
        if not self._is_fixed:
            self.threads = threads_for(busy, self._most)
        self._since_s, self._busy_before_s = time.perf_counter(), self.busy_s


def threads_for(busy: float, most: int) -> int:
    """Threads that the next seconds get.

    Args:
        busy: How many were at work on average. Where that is all there were, more are tried.
    """
    return min(most, max(1, math.ceil(_SPARE * busy)))
