"""Lines of metrics.jsonl that count: all but those of lost work, repeated or not.

A start of the processes continues from a saved step. What an earlier start did after that
step is lost: its lines stay in the file and count no more. That includes steps that are
never done again, because the run ends earlier now: with more devices
(optim.batch_per_device), or with fewer steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

Line = dict[str, Any]
Start = tuple[int, int]
"""A start of the processes: attempt and generation."""

_LOADED = ("checkpoint_loaded", "snapshot_restored")
_READY = "model_ready"
BEGINS = (*_LOADED, _READY)
"""Kinds of events by which a start says that it begins, and from which step."""


@dataclass(frozen=True, kw_only=True)
class CountedLines:
    """Lines of a run, in order of their steps."""

    steps: tuple[Line, ...]
    """One for each step."""
    evaluations: tuple[Line, ...]
    """At most one for each step."""
    lost: tuple[Line, ...]
    """Lines of lost steps, in order of the file."""
    least: tuple[tuple[Start, int], ...]
    """Each start, and the least step that it does."""

    def counts(self, event: Line) -> bool:
        """Return whether an event is of a step that counts, or of none."""
        step, start = event.get("step"), start_of(event)
        newer = (least for other, least in self.least if other > start)
        return step is None or step < min(newer, default=inf)


def counted(lines: Iterable[Line], events: Iterable[Line] = ()) -> CountedLines:
    """Split lines into those that count and those that do not.

    Args:
        lines: Of metrics.jsonl, as they are in the file.
        events: Of events.jsonl, as they are in the file.
    """
    ordered = _by_start(lines)
    begun = sorted((event for event in events if event.get("kind") in BEGINS), key=start_of)
    kept = sorted(counted_backwards(reversed(ordered), begins(reversed(begun))), key=_sort_key)
    known = {id(line) for line in kept}
    return CountedLines(
        steps=tuple(line for line in kept if "eval" not in line),
        evaluations=tuple(line for line in kept if "eval" in line),
        lost=tuple(line for line in ordered if "eval" not in line and id(line) not in known),
        least=_least_steps(ordered, begins(reversed(begun))),
    )


def _least_steps(
    lines: Iterable[Line], start_steps: Iterable[tuple[Start, int]]
) -> tuple[tuple[Start, int], ...]:
    least = {start: step + 1 for start, step in start_steps}
    for line in lines:
        if "eval" not in line:
            start = start_of(line)
            least[start] = min(line["step"], least.get(start, line["step"]))
    return tuple(least.items())


def counted_backwards(
    lines: Iterable[Line], start_steps: Iterable[tuple[Start, int]] = ()
) -> Iterator[Line]:
    """Yield the lines that count, the newest first, reading only as many as needed.

    Args:
        lines: The newest first.
        start_steps: Starts and the step that each continued from, the newest first: a start
            that has no
            line yet has undone earlier ones, too.
    """
    limit = own_least = (inf, False)
    current: Start | None = None
    seen: set[tuple[float, bool]] = set()
    waiting: list[Line] = []
    starts = iter(start_steps)
    newer = next(starts, None)
    for line in chain(lines, [None]):
        if line is not None:
            waiting.append(line)
            if "eval" in line:
                continue  # names no start: it is of the start of the step before it
            start = start_of(line)
            while newer is not None and newer[0] > start:
                limit = min(limit, (newer[1] + 1, False))
                newer = next(starts, None)
            if current is not None and start < current:
                limit = min(limit, own_least)
            if start != current:
                own_least, current = (inf, False), start
                seen.clear()
        for each in waiting:
            place = _sort_key(each)
            own_least = min(own_least, place)
            if place < limit and place not in seen:  # of two in one start the later one counts
                seen.add(place)
                yield each
        waiting.clear()


def begins(events: Iterable[Line]) -> Iterator[tuple[Start, int]]:
    """Yield starts and the step that each continued from; 0 for a fresh start.

    Args:
        events: The newest first.
    """
    ready: Start | None = None
    done: Start | None = None
    for event in events:
        kind, start = event.get("kind"), start_of(event)
        if kind not in BEGINS:
            continue
        if ready not in (None, start):
            assert ready is not None
            yield ready, 0
            ready = None
        if kind == _READY:
            ready = None if start == done else start
        elif type(event.get("step")) is int:
            yield start, event["step"]
            ready, done = None, start
    if ready is not None:
        yield ready, 0


def start_of(line: Line) -> Start:
    """The start of processes that a line or an event is of."""
    return line.get("attempt") or 0, line.get("generation") or 0


def _sort_key(line: Line) -> tuple[float, bool]:
    """An evaluation comes after its step."""
    return line["step"], "eval" in line


def _by_start(lines: Iterable[Line]) -> list[Line]:
    """In order of starts: a folder that was put together from logs may have them mixed."""
    placed = list(with_starts(lines))
    return [line for _, line in sorted(placed, key=lambda pair: pair[0] or (0, 0))]


def with_starts(lines: Iterable[Line]) -> Iterator[tuple[Start | None, Line]]:
    """Yield each line with its start: of an evaluation, that of the step before it.

    None: an evaluation without a step before it.
    """
    start: Start | None = None
    for line in lines:
        if "eval" not in line:
            start = start_of(line)
        yield start, line
