"""Curves of runs for a page: of a long run some hundred lines, spread evenly over its file.

A line stands for its neighbours, and none of those between is read: a hundred runs of ten thousand
steps are there within a second. Lines of lost steps are left out. What is not known is a gap.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import open_plain, parse_json
from shardyard.rundir.counted_lines import counted_backwards
from shardyard.rundir.jsonl import read_begins, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.metric_keys import METRIC_KEYS

KEYS = tuple(key for key in METRIC_KEYS if key not in ("step", "attempt", "generation", "phase"))
"""What may be drawn, beside evaluations."""
EVALUATION = "eval_"
"""Begins the name of a metric of evaluations: ``eval_loss``."""
X_KEYS = ("step", "epoch", "samples", "tokens")

_POINTS_OF_ALL, _MOST_POINTS, _LEAST_POINTS = 40_000, 2_000, 200
_LINE_BYTES = 620
"""Of metrics.jsonl, about."""


class Curves:
    """Of all runs that were asked for, kept while their files do not change."""

    def __init__(self, most_kept: int = 300) -> None:
        self._most_kept = most_kept
        self._lock = threading.Lock()
        self._kept: dict[tuple[Path, int], tuple[tuple[int, int, int], list[dict[str, Any]]]] = {}

    def read(self, runs: Sequence[RunDir], *, y: str, x: str) -> dict[str, dict[str, list[Any]]]:
        """Run id -> its points: ``{"x": [...], "y": [...]}``.

        Args:
            y: One of KEYS, or a metric of evaluations.
            x: One of X_KEYS.
        """
        share = _POINTS_OF_ALL // max(1, len(runs))
        most = min(_MOST_POINTS, max(_LEAST_POINTS, share))
        found = {}
        for run in runs:
            pairs = [_pair(line, x, y) for line in self._lines(run, most)]
            known = [pair for pair in pairs if pair is not None and pair[0] is not None]
            found[run.run_id] = {"x": [p[0] for p in known], "y": [_short(p[1]) for p in known]}
        return found

    def _lines(self, run: RunDir, most: int) -> list[dict[str, Any]]:
        path = run.metrics
        try:
            stat = path.stat()
        except OSError:
            return []
        stamp = (stat.st_size, stat.st_mtime_ns, _size_of(run.events))
        with self._lock:
            kept = self._kept.get((path, most))
            if kept is not None and kept[0] == stamp:
                return kept[1]
        try:
            thinned = _thinned(path, stat.st_size, most)
            lines = list(counted_backwards(reversed(thinned), read_begins(path)))[::-1]
        except (OSError, StorageError):  # of a run that the list calls unreadable
            return []
        with self._lock:
            self._kept.pop((path, most), None)
            self._kept[path, most] = (stamp, lines)
            while len(self._kept) > self._most_kept:
                del self._kept[next(iter(self._kept))]
        return lines


def _size_of(path: Path) -> int:
    """In bytes: a start that has no line yet undoes lines of others by its events."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _thinned(path: Path, size: int, most: int) -> list[dict[str, Any]]:
    """All lines of a short file; of a long one so many, and all of its evaluations near them."""
    if size <= most * _LINE_BYTES:
        return list(read_lines(path))
    found: list[dict[str, Any]] = []
    file = open_plain(path)
    try:
        for number in range(most):
            found += _step_after(file, size * number // most)
        end = max(0, size - 4 * _LINE_BYTES)
        found += _whole_lines(file, end, size - end)
    finally:
        os.close(file)
    return found


def _step_after(file: int, offset: int) -> list[dict[str, Any]]:
    """The first step that begins behind a place, and the evaluations before it."""
    found: list[dict[str, Any]] = []
    for size in (4 * _LINE_BYTES, 64 * _LINE_BYTES):  # the second, where lines are long
        for content in _whole_lines(file, offset, size):
            found.append(content)
            if "eval" not in content:
                return found
        found.clear()
    return found


def _whole_lines(file: int, offset: int, size: int) -> Iterator[dict[str, Any]]:
    """What stands between two places, without the lines that they cut."""
    *lines, _ = os.pread(file, size, offset).split(b"\n")
    for line in lines[1:] if offset else lines:
        if content := _object(line):
            yield content


def _pair(line: dict[str, Any], x: str, y: str) -> tuple[Any, Any] | None:
    if y.startswith(EVALUATION):
        return (
            (line.get(x), line["eval"].get(y.removeprefix(EVALUATION))) if "eval" in line else None
        )
    return None if "eval" in line else (line.get(x), line.get(y))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    is_line = isinstance(content, dict) and type(content.get("step")) is int
    return content if is_line and isinstance(content.get("eval", {}), dict) else None


def _short(value: Any) -> float | None:
    """Five digits are more than a page shows."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(f"{value:.5g}") if is_number else None
