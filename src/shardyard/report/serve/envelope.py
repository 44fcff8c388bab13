"""Least and greatest value of each metric over intervals of a long run.

A spike of one step stays visible however long the run is. The file is read once, and then
only what was appended to it. Stretches are merged in pairs as the run grows.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from shardyard.io.files import open_plain
from shardyard.report.serve.sampling import Line, step_or_evaluation
from shardyard.rundir.counted_lines import Start, start_of

_BLOCK_BYTES = 2**20


class Position(NamedTuple):
    """A step on each axis."""

    step: int
    epoch: float | None
    samples: int | None
    tokens: int | None
    step_time_s: float | None
    start: Start


def position_of(line: Line) -> Position:
    """Return where a line of metrics.jsonl is drawn."""
    get = line.get
    return Position(
        line["step"], get("epoch"), get("samples"), get("tokens"), get("step_time_s"),
        start_of(line),
    )  # fmt: skip


class _Extremes(NamedTuple):
    """Least and greatest value of a metric in a interval."""

    low_position: Position
    low: float
    high_position: Position
    high: float


class _Interval:
    """Neighbouring steps."""

    __slots__ = ("count", "extremes", "first")

    def __init__(self, first: Position) -> None:
        self.first = first
        self.count = 0
        self.extremes: dict[str, _Extremes] = {}

    def add(self, position: Position, values: dict[str, float]) -> None:
        """Count a step."""
        self.count += 1
        for key, value in values.items():
            known = self.extremes.get(key)
            if known is None:
                self.extremes[key] = _Extremes(position, value, position, value)
            elif value < known.low:
                self.extremes[key] = known._replace(low_position=position, low=value)
            elif value > known.high:
                self.extremes[key] = known._replace(high_position=position, high=value)

    def merge(self, later: "_Interval") -> None:
        """Count the steps of the next interval, too."""
        self.count += later.count
        for key, other in later.extremes.items():
            known = self.extremes.get(key)
            if known is None:
                self.extremes[key] = other
                continue
            low = known if known.low <= other.low else other
            high = known if known.high >= other.high else other
            self.extremes[key] = _Extremes(low.low_position, low.low, high.high_position, high.high)


class OutOfOrderError(Exception):
    """A file repeats steps that its events do not show to be lost."""


class Envelope:
    """Extremes of one run, with the first and the last of its steps."""

    def __init__(
        self, keys: Sequence[str], *, max_intervals: int, begins: tuple[tuple[Start, int], ...]
    ) -> None:
        """Begin without steps.

        Args:
            keys: Metrics.
            max_intervals: Of a curve; at least half as many are there once there are enough steps.
            begins: Starts of the processes and the step that each continued from.
        """
        self.begins = begins
        self.end = 0
        """Offset of the end of the last line that was read, in bytes."""
        self._keys = keys
        self._most = max_intervals
        self._steps_each = 1
        self._intervals: list[_Interval] = []
        self._ends: list[tuple[Position, dict[str, float]]] = []

    def read_on(self, path: Path) -> None:
        """Read what was appended to metrics.jsonl.

        Raises:
            OutOfOrderError: Steps are repeated, or the file is shorter than before.
            OSError, StorageError: The file cannot be read.
        """
        file = open_plain(path)
        try:
            if os.fstat(file).st_size < self.end:
                raise OutOfOrderError
            while block := os.pread(file, _BLOCK_BYTES, self.end):
                whole = block.rfind(b"\n") + 1
                if not whole:  # a line that is being written
                    break
                self.add(_steps_in(block[:whole]))
                self.end += whole
        finally:
            os.close(file)

    def add(self, lines: Iterable[Line]) -> None:
        """Count steps, in their order.

        Raises:
            OutOfOrderError: Steps are repeated.
        """
        for line in lines:
            start, step = start_of(line), line["step"]
            if any(step > since and start < newer for newer, since in self.begins):
                continue  # a later start undid it
            if self._ends:
                last = self._ends[-1][0]
                if step <= last.step or start < last.start:
                    raise OutOfOrderError
            self._add(line)

    def _add(self, line: Line) -> None:
        get, position = line.get, position_of(line)
        values: dict[str, float] = {
            key: value for key in self._keys if is_number(value := get(key))
        }
        if not self._intervals or self._intervals[-1].count >= self._steps_each:
            if len(self._intervals) == self._most:
                self._merge()
            self._intervals.append(_Interval(position))
        self._intervals[-1].add(position, values)
        self._ends[1 if self._ends else 0 :] = [(position, values)]

    def _merge(self) -> None:
        pairs = self._intervals
        for earlier, later in zip(pairs[::2], pairs[1::2], strict=True):
            earlier.merge(later)
        self._intervals, self._steps_each = pairs[::2], 2 * self._steps_each

    @property
    def seen_keys(self) -> set[str]:
        """Metrics that have a value."""
        return {key for interval in self._intervals for key in interval.extremes}

    def points(self, key: str) -> Iterator[tuple[Position, float | None]]:
        """Yield extremes of a metric in the order of their steps; None: not known in a interval."""
        last_step = -1
        for position, value in self._all_points(key):
            if position.step > last_step:
                yield position, value
                last_step = position.step

    def _all_points(self, key: str) -> Iterator[tuple[Position, float | None]]:
        for position, values in self._ends[:1]:
            yield position, values.get(key)
        for interval in self._intervals:
            found = interval.extremes.get(key)
            if found is None:
                yield interval.first, None
                continue
            pair = [(found.low_position, found.low), (found.high_position, found.high)]
            yield from sorted(pair, key=lambda each: each[0].step)
        for position, values in self._ends[1:]:
            yield position, values.get(key)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that JSON has."""
    kind = type(value)
    return kind is int or (kind is float and math.isfinite(value))


def short(value: Any) -> float | None:
    """Return a number with five digits, which are as many as a page shows."""
    return float(f"{value:.5g}") if is_number(value) else None


def _steps_in(block: bytes) -> Iterator[Line]:
    for text in block.splitlines():
        if b'"eval"' not in text and (line := step_or_evaluation(text)):
            yield line
