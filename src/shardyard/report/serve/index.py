"""List of the runs of a folder; a run is read again only when its files change.

Rows are kept in a file next to the runs, so that a page of ten thousand runs appears at
once. The file is a cache that may be deleted at any time. Whether a run continues is read
from its lease each time, as a process that was killed changes no file.

The speed of a run is the median of its steps, as in its report. It takes all lines of the
run, so it is measured between the requests and arrives after the rest of the row.
"""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import read_json, write_text
from shardyard.report.against_plan import steady
from shardyard.rundir.jsonl import latest_evaluation, read_counted
from shardyard.rundir.layout import RunDir, is_run
from shardyard.rundir.lease import is_locked
from shardyard.rundir.state import read_state_in_list

FILE = ".shardyard-runs.json"
_VERSION = 2
_LEAST_S = 0.5
_SHARE = 10
"""A scan takes at most 1 / _SHARE of the time: of ten thousand runs one may take a while."""
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
    """Median of the steps, as in the report; None: not measured yet, or not known."""
    updated_t: float | None
    """Unix seconds of the last change of its files."""


Stamp = tuple[int, int, int, int]
"""Size and time of change of events.jsonl and of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """Measured speed of a run and the state of its files then."""

    stamp: Stamp
    tokens_per_s: float | None
    next_s: float = 0.0
    """Monotonic time before which a run that grows is not measured again."""


class Index:
    """All runs of a folder; may be asked by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._speeds: dict[str, _Speed] = {}
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

    def measure_speed(self) -> bool:
        """Measure the speed of the most recently changed run that needs it.

        Returns:
            Whether there was such a run.
        """
        now_s = time.monotonic()
        with self._lock:
            waiting = (row.id for row in self._rows if self._needs_speed(row.id, now_s))
            name = next(waiting, None)
            if name is None:
                return False
            stamp = self._cached[name][0]
        value = _median_speed(RunDir(self.folder / name))
        next_s = time.monotonic() + _SHARE * (time.monotonic() - now_s)
        with self._lock:
            self._speeds[name] = _Speed(stamp=stamp, tokens_per_s=value, next_s=next_s)
            self._is_changed = True
        return True

    def _needs_speed(self, name: str, now_s: float) -> bool:
        known, entry = self._speeds.get(name), self._cached.get(name)
        if entry is None or entry[1].step is None:
            return False
        return known is None or (known.stamp != entry[0] and now_s >= known.next_s)

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
        speeds = {name: each for name, each in self._speeds.items() if name in rows_by_name}
        self._speeds = speeds
        rows = [
            replace(row, tokens_per_s=speeds[name].tokens_per_s) if name in speeds else row
            for name, (_, row) in rows_by_name.items()
        ]
        return sorted(rows, key=lambda row: (row.updated_t or 0.0, row.id), reverse=True)

    def _read_cache(self) -> dict[str, tuple[Stamp, RunRow]]:
        try:
            content = read_json(self.folder / FILE)
            if content["version"] != _VERSION:
                return {}
            self._speeds = {
                name: _Speed(stamp=_as_stamp(stamp), tokens_per_s=value)
                for name, (stamp, value) in content["speeds"].items()
            }
            return {
                entry["row"]["id"]: (_as_stamp(entry["stamp"]), RunRow(**entry["row"]))
                for entry in content["runs"]
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._speeds = {}
            return {}

    def _write_now_and_then(self) -> None:
        if self._is_changed and time.monotonic() - self._written_s > _WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        if not self._is_changed:
            return
        entries = [{"stamp": stamp, "row": vars(row)} for stamp, row in self._cached.values()]
        with suppress(StorageError):  # a folder of somebody else: it is read anew each time
            speeds = {name: (each.stamp, each.tokens_per_s) for name, each in self._speeds.items()}
            text = json.dumps({"version": _VERSION, "runs": entries, "speeds": speeds})
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
        tokens_per_s=None,
        updated_t=state.updated_at,
    )


def _median_speed(run: RunDir) -> float | None:
    """The number of the report: ``against_plan.median_tokens_per_s``, without the other files."""
    try:
        values = steady(read_counted(run.metrics).steps, "tokens_per_s")
    except (OSError, StorageError, ValueError):
        return None
    return median(values) if values else None


def _as_it_goes_on(run: RunDir, row: RunRow) -> RunRow:
    """Return the same row if the run's lease is held or free as before, else a reread one."""
    is_going = row.state in ("running", "draining")
    with suppress(StorageError):
        if is_locked(run.lease) == is_going:
            return row
    return replace(row, state=read_state_in_list(run).state)
