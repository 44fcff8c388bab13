"""Curves of runs for the page: some hundred points of a long run.

At first these are lines spread evenly over its file, so that a hundred runs of ten thousand
steps are there within a second. Between requests the other lines are read, and the points
are the extremes of each interval of steps from then on. Lines of lost steps are left out. A
value that is not known is a gap.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardyard.errors import StorageError
from shardyard.report.serve.clock import StepClock
from shardyard.report.serve.envelope import (
    Envelope,
    OutOfOrderError,
    Position,
    is_number,
    position_of,
    short,
)
from shardyard.report.serve.sampling import (
    LINE_BYTES,
    NO_SCAN,
    Line,
    Scan,
    downsample,
    scan_evaluations,
)
from shardyard.report.serve.utilisation import (
    HOURS,
    UTILISATION,
    device_samples,
    utilisation_curve,
)
from shardyard.rundir.counted_lines import Start, counted_backwards, start_of
from shardyard.rundir.jsonl import METRIC_KEYS, read_begins
from shardyard.rundir.layout import RunDir

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Begins = tuple[tuple[Start, int], ...]

KEYS = tuple(key for key in METRIC_KEYS if key not in ("step", "attempt", "generation", "phase"))
"""Metrics of a step that can be drawn."""
EVALUATION = "eval_"
"""Begins the name of a metric of evaluations: ``eval_loss``."""
X_KEYS = ("step", "epoch", "samples", "tokens", HOURS)

_POINTS_OF_ALL, _LEAST_POINTS = 40_000, 200
_NUMBERS_OF_POINTS = (2000, 1000, 400)
_ROUGH = 4
"""Part of the points of a long run that are read while its page waits."""


def can_draw(y: str, x: str) -> bool:
    """Whether two names from outside are a metric and an axis."""
    return x in X_KEYS and (y in KEYS or y == UTILISATION or y.startswith(EVALUATION))


class _Points(Protocol):
    """Steps or evaluations of one run that are drawn."""

    def of(self, key: str) -> Sequence[tuple[Position, Any]]:
        """Return the values of a metric in their order; None: not known."""

    def keys(self) -> set[str]:
        """Return the metrics that have a value."""


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """Lines of a file, and where each is drawn."""

    positions: Sequence[Position] = ()
    values: Sequence[Line] = ()

    def of(self, key: str) -> Sequence[tuple[Position, Any]]:
        return [
            (position, line.get(key))
            for position, line in zip(self.positions, self.values, strict=True)
        ]

    def keys(self) -> set[str]:
        return {key for key in KEYS if any(line.get(key) is not None for line in self.values)}


@dataclass(frozen=True, kw_only=True)
class _Extremes:
    """Curves of a long run that keep all extremes."""

    envelope: Envelope
    lock: threading.Lock

    def of(self, key: str) -> Sequence[tuple[Position, Any]]:
        with self.lock:
            return list(self.envelope.points(key))

    def keys(self) -> set[str]:
        with self.lock:
            return self.envelope.seen_keys


class Curves:
    """Curves of all requested runs, kept while their files do not change.

    Of a long run some lines are read at first. ``refine`` reads the others, between requests.
    """

    def __init__(self, max_cached: int = 300) -> None:
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._cache: dict[tuple[Path, int], tuple[tuple[int, int, int], _Lines]] = {}
        self._scans: dict[Path, Scan] = {}
        self._clocks: dict[Path, tuple[int, StepClock]] = {}
        self._envelopes: dict[tuple[Path, int], Envelope] = {}
        self._rough: dict[tuple[Path, int], None] = {}
        """Runs and most points of those of which only some lines are read."""
        self._unordered: set[Path] = set()
        self._refined: dict[str, int] = {}

    def read(
        self, runs: Sequence[RunDir], *, y: str, x: str, sharing: int = 0
    ) -> dict[str, dict[str, list[Any]]]:
        """Run id -> its points: ``{"x": [...], "y": [...]}``.

        Args:
            y: One of KEYS, UTILISATION, or a metric of evaluations.
            x: One of X_KEYS.
            sharing: Number of runs that share the page, where more than are read now.
        """
        most = _most_points(max(len(runs), sharing))
        return {run.run_id: self._curve(run, y=y, x=x, most=most) for run in runs}

    def keys(self, runs: Sequence[RunDir], *, sharing: int = 0) -> list[str]:
        """Metrics of steps that have a value in one of the runs."""
        most = _most_points(max(len(runs), sharing))
        found = set().union(*(self._points(run, most).keys() for run in runs))
        return [key for key in KEYS if key in found]

    def refinements(self, run_id: str) -> int:
        """Return how often all lines of a run were read since the start: its curves differ then."""
        return self._refined.get(run_id, 0)

    def refine(self) -> bool:
        """Read all lines of a run of which only some were read.

        Returns:
            Whether there was such a run.
        """
        with self._lock:
            if not self._rough:
                return False
            path, most = wanted = next(iter(self._rough))
            del self._rough[wanted]
        try:
            envelope = _read_envelope(path, most)
        except (OSError, StorageError):
            return True
        with self._lock:
            if envelope is None:
                self._unordered.add(path)
                return True
            _keep(self._envelopes, wanted, envelope, most=self._max_cached)
            self._cache.pop(wanted, None)
            name = path.parent.name
            self._refined[name] = self._refined.get(name, 0) + 1
        return True

    def _curve(self, run: RunDir, *, y: str, x: str, most: int) -> dict[str, list[Any]]:
        if y == UTILISATION:
            samples = device_samples(run)
            points = self._points(run, most) if samples and x not in ("step", HOURS) else _Lines()
            start_t = self._clock(run).start_t if samples and x == HOURS else None
            return utilisation_curve(
                samples, x, [position for position, _ in points.of(x)], start_t
            )
        is_evaluation, key = y.startswith(EVALUATION), y.removeprefix(EVALUATION)
        points = self._evaluations(run) if is_evaluation else self._points(run, most)
        clock = self._clock(run) if x == HOURS else None
        xs: list[Any] = []
        ys: list[Any] = []
        for position, value in points.of(key):
            at = clock.hours(position) if clock else getattr(position, x)
            if is_number(at):
                xs.append(at)
                ys.append(short(value))
        return {"x": xs, "y": ys}

    def _clock(self, run: RunDir) -> StepClock:
        size = _size_of(run.events)
        kept = self._clocks.get(run.events)
        if kept is None or kept[0] != size:
            kept = (size, StepClock(run))
            with self._lock:
                _keep(self._clocks, run.events, kept, most=self._max_cached)
        return kept[1]

    def _points(self, run: RunDir, most: int) -> _Points:
        path = run.metrics
        try:
            stat = path.stat()
        except OSError:
            return _Lines()
        stamp = (stat.st_size, stat.st_mtime_ns, _size_of(run.events))
        is_long = stat.st_size > most * LINE_BYTES
        with self._lock:
            kept = self._cache.get((path, most))
            if kept is not None and kept[0] == stamp:
                return kept[1]
        try:
            begins = tuple(read_begins(path))
            if is_long and (extremes := self._extremes(path, most, begins)):
                return extremes
            some = downsample(path, stat.st_size, most // _ROUGH if is_long else most)
        except (OSError, StorageError):  # of a run that the list calls unreadable
            return _Lines()
        lines = some if _is_ordered(some, begins) else counted_in_order(some, begins)
        steps = [line for line in lines if "eval" not in line]
        points = _Lines(positions=[position_of(line) for line in steps], values=steps)
        with self._lock:
            _keep(self._cache, (path, most), (stamp, points), most=self._max_cached)
            if is_long and path not in self._unordered:
                self._rough[path, most] = None
        return points

    def _extremes(self, path: Path, most: int, begins: Begins) -> _Extremes | None:
        """Return what is known of all lines, with those that were appended; None: read it anew."""
        with self._lock:
            envelope = self._envelopes.get((path, most))
            if envelope is None:
                return None
            try:
                if envelope.begins == begins:
                    envelope.read_on(path)
                    return _Extremes(envelope=envelope, lock=self._lock)
            except OutOfOrderError:
                pass
            del self._envelopes[path, most]
            return None

    def _evaluations(self, run: RunDir) -> _Lines:
        """Return all evaluations that count, each at the position of its step."""
        path = run.metrics
        with self._lock:
            known = self._scans.pop(path, NO_SCAN)
        try:
            scan = scan_evaluations(path, known)
            lines = counted_in_order(scan.lines, read_begins(path))
        except (OSError, StorageError):
            return _Lines()
        with self._lock:
            _keep(self._scans, path, scan, most=self._max_cached)
        positions: list[Position] = []
        values: list[Line] = []
        step_line: Line = {}
        for line in lines:
            if "eval" not in line:
                step_line = line
                continue
            positions.append(position_of({**step_line, "step": line["step"]}))
            values.append(line["eval"])
        return _Lines(positions=positions, values=values)


def _most_points(runs: int) -> int:
    """Most points of a curve: few values, so that what is kept serves other numbers of runs too."""
    share = _POINTS_OF_ALL // max(1, runs)
    return next((each for each in _NUMBERS_OF_POINTS if each <= share), _LEAST_POINTS)


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value, *, most: int) -> None:
    """Add to what is kept; the oldest is dropped."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


def _read_envelope(path: Path, most: int) -> Envelope | None:
    """Read all lines of a run; None: steps are repeated, and there are too many lines to sort."""
    begins = tuple(read_begins(path))
    envelope = Envelope(KEYS, max_intervals=most // 2, begins=begins)
    try:
        envelope.read_on(path)
    except OutOfOrderError:
        return None
    return envelope


def _is_ordered(lines: Sequence[Line], begins: Begins) -> bool:
    """Whether all lines count: one start of the processes wrote them, and none came later."""
    starts = {start_of(line) for line in lines if "eval" not in line}
    if len(starts) != 1 or any(newer > start for newer, _ in begins for start in starts):
        return False
    positions = [(line["step"], "eval" in line) for line in lines]
    return all(before < after for before, after in pairwise(positions))


def counted_in_order(lines: Sequence[Line], begins: Iterable[tuple[Start, int]]) -> list[Line]:
    """Return the lines that count in the order of the file."""
    return list(counted_backwards(reversed(lines), begins))[::-1]


def _size_of(path: Path) -> int:
    """In bytes: a start that has no line yet undoes lines of others by its events."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
