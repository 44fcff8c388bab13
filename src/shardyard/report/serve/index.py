"""Runs of a folder as rows, read again only where their files have changed.

Rows are kept in a file next to the runs, so that a page of ten thousand runs appears at
once. The file is a cache that may be deleted at any time. Whether a run continues is read
from its lease each time, as a process that was killed changes no file.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import open_plain, parse_json, read_json, write_text
from shardyard.rundir.counted_lines import counted_backwards
from shardyard.rundir.jsonl import METRIC_KEYS, latest_evaluation, read_begins, read_lines
from shardyard.rundir.layout import RunDir, is_run
from shardyard.rundir.lease import is_locked
from shardyard.rundir.state import read_state_in_list

FILE = ".shardyard-runs.json"
_VERSION = 1
_LEAST_S = 0.5
_SHARE = 10
"""A look takes at most so much of the time: of ten thousand runs one may take a while."""
_WRITE_EVERY_S = 30.0
_NEWEST_BYTES = 2**18
"""An evaluation that is further back than some hundred steps is not looked for."""
_MOVING = ("running", "draining", "lost")
"""States that change without a file: a process ends without a word, or one takes up the run."""
_UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run of the list."""

    id: str
    state: str
    step: int | None
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    updated_t: float | None


Stamp = tuple[int, int, int, int]
"""Size and time of change of events.jsonl and of metrics.jsonl."""


class Index:
    """All runs of a folder; may be asked by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._cached: dict[str, tuple[Stamp, RunRow]] = self._read_cache()
        self._rows: list[RunRow] = []
        self._scanned_s = self._scan_duration_s = 0.0
        self._written_s = time.monotonic()
        self._is_changed = False

    def rows(self) -> list[RunRow]:
        """Return the runs, the most recently changed first; reread now and then."""
        with self._lock:
            now_s = time.monotonic()
            if not self._rows or now_s - self._scanned_s > max(
                _LEAST_S, _SHARE * self._scan_duration_s
            ):
                self._rows = self._scan()
                self._scanned_s = time.monotonic()
                self._scan_duration_s = self._scanned_s - now_s
                self._write_now_and_then()
            return self._rows

    def has(self, run_id: str) -> bool:
        """Whether there is such a run: an id from outside is never a path before."""
        return any(row.id == run_id for row in self.rows())

    def write(self) -> None:
        """Keep what is known for the next start."""
        if self._lock.acquire(timeout=1):  # a thread may wait for a file system that hangs
            try:
                self._write()
            finally:
                self._lock.release()

    def _scan(self) -> list[RunRow]:
        rows_by_name: dict[str, tuple[Stamp, RunRow]] = {}
        try:
            entries = list(os.scandir(self.folder))
        except OSError:
            entries = []
        for entry in entries:
            if entry.name.startswith(".") or not _is_folder(entry):
                continue
            stamp = _stamp(entry.path)
            known = self._cached.get(entry.name)
            if known is None or known[0] != stamp or known[1].state == _UNREADABLE:
                if not is_run(Path(entry.path)):
                    continue
                known = (stamp, _read(RunDir(Path(entry.path))))
                self._is_changed = True
            elif known[1].state in _MOVING:
                known = (stamp, _as_it_goes_on(RunDir(Path(entry.path)), known[1]))
            rows_by_name[entry.name] = known
        self._is_changed |= rows_by_name.keys() != self._cached.keys()
        self._cached = rows_by_name
        rows = [row for _, row in rows_by_name.values()]
        return sorted(rows, key=lambda row: (row.updated_t or 0.0, row.id), reverse=True)

    def _read_cache(self) -> dict[str, tuple[Stamp, RunRow]]:
        try:
            content = read_json(self.folder / FILE)
            if content["version"] != _VERSION:
                return {}
            return {
                entry["row"]["id"]: (_as_stamp(entry["stamp"]), RunRow(**entry["row"]))
                for entry in content["runs"]
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write_now_and_then(self) -> None:
        if self._is_changed and time.monotonic() - self._written_s > _WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        if not self._is_changed:
            return
        entries = [{"stamp": stamp, "row": vars(row)} for stamp, row in self._cached.values()]
        with suppress(StorageError):  # a folder of somebody else: it is read anew each time
            text = json.dumps({"version": _VERSION, "runs": entries})
            write_text(self.folder / FILE, text)
        self._written_s, self._is_changed = time.monotonic(), False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _stamp(folder: str) -> Stamp:
    sizes: list[int] = []
    for name in ("events.jsonl", "metrics.jsonl"):
        try:
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116  Path costs twice
            sizes += [found.st_size, found.st_mtime_ns]
        except OSError:
            sizes += [0, 0]
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _as_stamp(numbers: Any) -> Stamp:
    a, b, c, d = map(int, numbers)
    return a, b, c, d


def _read(run: RunDir) -> RunRow:
    state = read_state_in_list(run)
    newest = None
    if state.problem is None:
        newest = latest_evaluation(run.metrics, most_bytes=_NEWEST_BYTES)
    evaluation = {} if newest is None else newest["eval"]
    return RunRow(
        id=run.run_id,
        state=state.state,
        step=state.step,
        loss=state.loss,
        eval_loss=evaluation.get("loss"),
        tokens_per_s=state.tokens_per_s,
        updated_t=state.updated_at,
    )


def _as_it_goes_on(run: RunDir, row: RunRow) -> RunRow:
    """Return the same row if the run's lease is held or free as before, else a reread one."""
    is_going = row.state in ("running", "draining")
    with suppress(StorageError):
        if is_locked(run.lease) == is_going:
            return row
    return replace(row, state=read_state_in_list(run).state)


# Curves of runs for a page: of a long run some hundred lines, spread evenly over its file.
#
# A line stands for its neighbours, and none of those between is read: a hundred runs of ten
# thousand steps are there within a second. Lines of lost steps are left out. What is not known is a
# gap.

KEYS = tuple(key for key in METRIC_KEYS if key not in ("step", "attempt", "generation", "phase"))
"""Metrics that can be drawn, in addition to evaluations."""
EVALUATION = "eval_"
"""Begins the name of a metric of evaluations: ``eval_loss``."""
X_KEYS = ("step", "epoch", "samples", "tokens")

_POINTS_OF_ALL, _MOST_POINTS, _LEAST_POINTS = 40_000, 2_000, 200
_LINE_BYTES = 620
"""Approximate bytes of a line of metrics.jsonl."""


class Curves:
    """Curves of all requested runs, kept while their files do not change."""

    def __init__(self, max_cached: int = 300) -> None:
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._cache: dict[tuple[Path, int], tuple[tuple[int, int, int], list[dict[str, Any]]]] = {}

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
            kept = self._cache.get((path, most))
            if kept is not None and kept[0] == stamp:
                return kept[1]
        try:
            thinned = _downsample(path, stat.st_size, most)
            lines = list(counted_backwards(reversed(thinned), read_begins(path)))[::-1]
        except (OSError, StorageError):  # of a run that the list calls unreadable
            return []
        with self._lock:
            self._cache.pop((path, most), None)
            self._cache[path, most] = (stamp, lines)
            while len(self._cache) > self._max_cached:
                del self._cache[next(iter(self._cache))]
        return lines


def _size_of(path: Path) -> int:
    """In bytes: a start that has no line yet undoes lines of others by its events."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _downsample(path: Path, size: int, most: int) -> list[dict[str, Any]]:
    """All lines of a short file; of a long one so many, and all of its evaluations near them."""
    if size <= most * _LINE_BYTES:
        return list(read_lines(path))
    lines: list[dict[str, Any]] = []
    file = open_plain(path)
    try:
        for number in range(most):
            lines += _step_after(file, size * number // most)
        end = max(0, size - 4 * _LINE_BYTES)
        lines += _whole_lines(file, end, size - end)
    finally:
        os.close(file)
    return lines


def _step_after(file: int, offset: int) -> list[dict[str, Any]]:
    """The first step that begins behind a place, and the evaluations before it."""
    lines: list[dict[str, Any]] = []
    for size in (4 * _LINE_BYTES, 64 * _LINE_BYTES):  # the second, where lines are long
        for content in _whole_lines(file, offset, size):
            lines.append(content)
            if "eval" not in content:
                return lines
        lines.clear()
    return lines


def _whole_lines(file: int, offset: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the lines between two places of a file, without the lines that they cut."""
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
