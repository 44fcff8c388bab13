"""Curves of runs for the page: some hundred points of a long run, spread evenly over its file.

A line stands for its neighbours, and the lines in between are not read: a hundred runs of
ten thousand steps are there within a second. Lines of lost steps are left out. A value that
is not known is a gap.
"""

import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import open_plain, parse_json
from shardyard.rundir.counted_lines import Start, counted_backwards, start_of, with_starts
from shardyard.rundir.jsonl import METRIC_KEYS, read_begins, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.telemetry import TelemetrySample, nodes_with_telemetry, read_downsampled

Line = dict[str, Any]

KEYS = tuple(key for key in METRIC_KEYS if key not in ("step", "attempt", "generation", "phase"))
"""Metrics of a step that can be drawn."""
EVALUATION = "eval_"
"""Begins the name of a metric of evaluations: ``eval_loss``."""
UTILISATION = "utilisation"
"""Mean utilisation of the devices, from telemetry."""
HOURS = "hours"
"""Hours since the run's first event."""
X_KEYS = ("step", "epoch", "samples", "tokens", HOURS)

_POINTS_OF_ALL, _MOST_POINTS, _LEAST_POINTS = 40_000, 2_000, 200
_LINE_BYTES = 620
"""Approximate bytes of a line of metrics.jsonl."""
_MOST_SAMPLES, _MOST_NODES = 320, 16


def can_draw(y: str, x: str) -> bool:
    """Whether two names from outside are a metric and an axis."""
    return x in X_KEYS and (y in KEYS or y == UTILISATION or y.startswith(EVALUATION))


@dataclass(frozen=True, kw_only=True)
class _Points:
    """Lines of one run that are drawn."""

    lines: list[Line]
    starts: list[Start | None]
    """Start that each line is of."""


class Curves:
    """Curves of all requested runs, kept while their files do not change."""

    def __init__(self, max_cached: int = 300) -> None:
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._cache: dict[tuple[Path, int], tuple[tuple[int, int, int], _Points]] = {}
        self._scans: dict[Path, _Scan] = {}

    def read(
        self, runs: Sequence[RunDir], *, y: str, x: str, sharing: int = 0
    ) -> dict[str, dict[str, list[Any]]]:
        """Run id -> its points: ``{"x": [...], "y": [...]}``.

        Args:
            y: One of KEYS, UTILISATION, or a metric of evaluations.
            x: One of X_KEYS.
            sharing: Number of runs that share the page, where more than are read now.
        """
        share = _POINTS_OF_ALL // max(1, len(runs), sharing)
        most = min(_MOST_POINTS, max(_LEAST_POINTS, share))
        return {run.run_id: self._curve(run, y=y, x=x, most=most) for run in runs}

    def _curve(self, run: RunDir, *, y: str, x: str, most: int) -> dict[str, list[Any]]:
        if y == UTILISATION:
            samples = _device_samples(run)
            points = self._points(run, most) if samples and x not in ("step", HOURS) else None
            return _utilisation(run, samples, x, points.lines if points else [])
        is_evaluation, key = y.startswith(EVALUATION), y.removeprefix(EVALUATION)
        points = self._evaluations(run) if is_evaluation else self._points(run, most)
        clock = _Clock(run) if x == HOURS else None
        step_line: Line = {}
        xs: list[Any] = []
        ys: list[Any] = []
        for line, start in zip(points.lines, points.starts, strict=True):
            step_line = step_line if "eval" in line else line
            if is_evaluation != ("eval" in line):
                continue
            placed = line if x == "step" or not is_evaluation else step_line
            place = clock.hours(start, placed) if clock else placed.get(x)
            if _is_finite(place):
                xs.append(place)
                ys.append(_short((line["eval"] if is_evaluation else line).get(key)))
        return {"x": xs, "y": ys}

    def _points(self, run: RunDir, most: int) -> _Points:
        path = run.metrics
        try:
            stat = path.stat()
        except OSError:
            return _Points(lines=[], starts=[])
        stamp = (stat.st_size, stat.st_mtime_ns, _size_of(run.events))
        with self._lock:
            kept = self._cache.get((path, most))
            if kept is not None and kept[0] == stamp:
                return kept[1]
        try:
            thinned = _downsample(path, stat.st_size, most)
            lines = list(counted_backwards(reversed(thinned), read_begins(path)))[::-1]
        except (OSError, StorageError):  # of a run that the list calls unreadable
            return _Points(lines=[], starts=[])
        points = _Points(lines=lines, starts=[start for start, _ in with_starts(lines)])
        with self._lock:
            self._cache.pop((path, most), None)
            self._cache[path, most] = (stamp, points)
            while len(self._cache) > self._max_cached:
                del self._cache[next(iter(self._cache))]
        return points

    def _evaluations(self, run: RunDir) -> _Points:
        """Return all evaluations that count, each behind the line of its step."""
        path = run.metrics
        with self._lock:
            known = self._scans.pop(path, _NO_SCAN)
        try:
            scan = _scan_evaluations(path, known)
            lines = list(counted_backwards(reversed(scan.lines), read_begins(path)))[::-1]
        except (OSError, StorageError):
            return _Points(lines=[], starts=[])
        with self._lock:
            self._scans[path] = scan
            while len(self._scans) > self._max_cached:
                del self._scans[next(iter(self._scans))]
        return _Points(lines=lines, starts=[start for start, _ in with_starts(lines)])


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """Evaluations in the part of a file that was searched."""

    lines: tuple[Line, ...]
    """Each evaluation behind the line before it."""
    last_line: int
    """Offset of the last whole line, in bytes."""
    end: int
    """Offset of the end of that line."""


_NO_SCAN = _Scan(lines=(), last_line=0, end=0)
_SCAN_BYTES = 2**20


def _scan_evaluations(path: Path, known: _Scan) -> _Scan:
    """Search what was appended to a file since the last search, without parsing other lines."""
    file = open_plain(path)
    try:
        if os.fstat(file).st_size < known.end:
            known = _NO_SCAN
        lines, start, end = list(known.lines), known.last_line, known.end
        data = b""
        while block := os.pread(file, _SCAN_BYTES, start + len(data)):
            data += block
            whole = data.rfind(b"\n") + 1
            if start + whole <= end:
                continue
            lines += _evaluations_in(data, end - start, whole)
            end = start + whole
            last = data.rfind(b"\n", 0, whole - 1) + 1
            data, start = data[last:], start + last
    finally:
        os.close(file)
    return _Scan(lines=tuple(lines), last_line=start, end=end)


def _evaluations_in(data: bytes, offset: int, end: int) -> Iterator[Line]:
    """Yield evaluations between two ends of lines, and the line before each."""
    while (place := data.find(b'"eval"', offset, end)) >= 0:
        first, offset = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place) + 1
        line = _object(data[first:offset])
        if line is None or "eval" not in line:
            continue
        before = _object(data[data.rfind(b"\n", 0, max(0, first - 1)) + 1 : first])
        if before is not None:
            yield before
        yield line


def _size_of(path: Path) -> int:
    """In bytes: a start that has no line yet undoes lines of others by its events."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _downsample(path: Path, size: int, most: int) -> list[Line]:
    """All lines of a short file; of a long one so many, and all of its evaluations near them."""
    if size <= most * _LINE_BYTES:
        return list(read_lines(path))
    lines: list[Line] = []
    file = open_plain(path)
    try:
        for number in range(most):
            lines += _step_after(file, size * number // most)
        end = max(0, size - 4 * _LINE_BYTES)
        lines += _whole_lines(file, end, size - end)
    finally:
        os.close(file)
    return lines


def _step_after(file: int, offset: int) -> list[Line]:
    """The first step that begins behind a place, and the evaluations before it."""
    lines: list[Line] = []
    for size in (4 * _LINE_BYTES, 64 * _LINE_BYTES):  # the second, where lines are long
        for content in _whole_lines(file, offset, size):
            lines.append(content)
            if "eval" not in content:
                return lines
        lines.clear()
    return lines


def _whole_lines(file: int, offset: int, size: int) -> Iterator[Line]:
    """Yield the lines between two places of a file, without the lines that they cut."""
    *lines, _ = os.pread(file, size, offset).split(b"\n")
    for line in lines[1:] if offset else lines:
        if content := _object(line):
            yield content


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """Value at a place between known ones; beyond them, that of the nearest."""
    if not xs:
        return None
    index = bisect_left(xs, x)
    if index == len(xs) or xs[index] == x or index == 0:
        return ys[min(index, len(xs) - 1)]
    low, high = xs[index - 1], xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - low) / (high - low)


def _object(line: bytes) -> Line | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    is_line = isinstance(content, dict) and type(content.get("step")) is int
    return content if is_line and isinstance(content.get("eval", {}), dict) else None


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that JSON has."""
    kind = type(value)
    return kind is int or (kind is float and math.isfinite(value))


def _short(value: Any) -> float | None:
    """Five digits are as many as a page shows."""
    return float(f"{value:.5g}") if _is_finite(value) else None


class _Clock:
    """Time of each step of a run.

    Lines of steps carry no time. Events carry both, and steps between two events are taken
    to be equally long.
    """

    _KINDS = (
        "checkpoint_loaded", "snapshot_restored", "model_ready", "first_step", "evaluated",
        "checkpoint_started",
    )  # fmt: skip

    def __init__(self, run: RunDir) -> None:
        self.start_t: float | None = None
        self._marks: dict[Start, tuple[list[int], list[float]]] = {}
        loaded: dict[Start, int] = {}
        try:
            for event in read_lines(run.events):
                t, start, kind = event.get("t"), start_of(event), event.get("kind")
                if t is None:
                    continue
                self.start_t = t if self.start_t is None else self.start_t
                step = event.get("step")
                if kind == "model_ready":
                    step = loaded.get(start, 0)
                elif kind in ("checkpoint_loaded", "snapshot_restored") and type(step) is int:
                    loaded[start] = step
                if kind in self._KINDS and type(step) is int:
                    self._add(start, step, t)
        except (OSError, StorageError):
            return

    def _add(self, start: Start, step: int, t: float) -> None:
        steps, times = self._marks.setdefault(start, ([], []))
        if steps and steps[-1] >= step:  # of one step the latest, so that a pause is before a step
            if steps[-1] == step:
                times[-1] = t
            return
        steps.append(step)
        times.append(t)

    def hours(self, start: Start | None, line: Line) -> float | None:
        """Return the hours from the run's first event to the end of a step."""
        steps, times = self._marks.get(start or (0, 0), ([], []))
        if not steps or self.start_t is None:
            return None
        step = line["step"]
        index = bisect_right(steps, step)
        if index == 0 or index == len(steps):  # before the first mark, or after the last
            place = min(max(index - 1, 0), len(steps) - 1)
            t = times[place] + (step - steps[place]) * (line.get("step_time_s") or 0.0)
        else:
            low, high = steps[index - 1], steps[index]
            t = times[index - 1] + (times[index] - times[index - 1]) * (step - low) / (high - low)
        return round((float(t) - self.start_t) / 3600, 6)


def _device_samples(run: RunDir) -> list[tuple[float, int | None, float]]:
    """Time, step and mean utilisation of the devices, in order of time."""
    files = list(nodes_with_telemetry(run).values())
    files = files[:: -(-len(files) // _MOST_NODES) or 1]  # of many nodes some, evenly picked
    found = []
    for path in files:
        try:
            samples = read_downsampled(path, most=_MOST_SAMPLES // len(files))
        except (OSError, StorageError):
            continue
        found += [point for sample in samples if (point := _device_sample(sample))]
    found.sort(key=lambda point: point[0])
    size = len(files)
    groups = [found[k : k + size] for k in range(0, len(found), max(1, size))]
    return [(g[-1][0], g[-1][1], sum(each[2] for each in g) / len(g)) for g in groups]


def _device_sample(sample: TelemetrySample) -> tuple[float, int | None, float] | None:
    values = [each for each in sample.devices.get(UTILISATION, ()) if each is not None]
    steps = [int(step) for step in sample.ranks.get("step", ()) if step is not None]
    if not values:
        return None
    return sample.t, max(steps, default=None), sum(values) / len(values)


def _utilisation(
    run: RunDir,
    samples: Sequence[tuple[float, int | None, float]],
    x: str,
    lines: Sequence[Line],
) -> dict[str, list[Any]]:
    if not samples:
        return {"x": [], "y": []}
    if x == HOURS:
        start_t = _Clock(run).start_t
        first_t = samples[0][0] if start_t is None else start_t
        hours = [round((t - first_t) / 3600, 6) for t, _, _ in samples]
        return {"x": hours, "y": [_short(value) for _, _, value in samples]}
    points = [(step, value) for _, step, value in samples if step is not None]
    # of lost steps, and of samples within one step, the last counts
    kept = [
        point for point, least in zip(points, _least_after(points), strict=True) if point[0] < least
    ]
    if x == "step":
        return {"x": [step for step, _ in kept], "y": [_short(value) for _, value in kept]}
    steps = [line for line in lines if "eval" not in line and line.get(x) is not None]
    numbers, places = [line["step"] for line in steps], [line[x] for line in steps]
    known = [(_between(numbers, places, step), value) for step, value in kept]
    return {
        "x": [place for place, _ in known if place is not None],
        "y": [_short(value) for place, value in known if place is not None],
    }


def _least_after(points: Sequence[tuple[int, float]]) -> list[float]:
    """For each point, the least step of the points after it."""
    found: list[float] = [float("inf")]
    for step, _ in reversed(points[1:]):
        found.append(min(found[-1], step))
    return found[::-1]
