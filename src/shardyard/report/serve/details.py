"""Reads a run for the page, besides its curves: events, logs, settings and pages in its folder.

Files are looked up by fixed names and by numbers, and only inside the folder of the run, so
that no link leads out of it.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardyard.config.resolved import flatten
from shardyard.control.follow import describe_event
from shardyard.errors import JsonFileError, StorageError
from shardyard.io.files import open_plain, read_json_object, read_plain
from shardyard.io.sanitize import sanitize
from shardyard.report.compare.differences import OWN
from shardyard.report.timeline import describe
from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir

PAGES = {"report.html": "Report", "plan.html": "Plan"}
"""Pages in a run's folder that are served, and their titles."""
_MOST_EVENTS = 2000
_MOST_LOG_BYTES = 64 * 2**10
_MOST_PAGE_BYTES = 64 * 2**20
_MOST_SETTING_CHARACTERS = 200


def inside(run: RunDir, path: Path) -> Path | None:
    """A plain file of a run's folder; None: it is missing, or a link leads out of the folder."""
    try:
        found = path.resolve(strict=True)
        is_inside = found.is_relative_to(run.path.resolve(strict=True)) and found.is_file()
    except (OSError, RuntimeError):
        return None
    return found if is_inside else None


def read_page(run: RunDir, name: str) -> bytes | None:
    """Content of one of PAGES in a run's folder; None: it has no such page."""
    path = inside(run, run.path / name) if name in PAGES else None
    return None if path is None else read_plain(path, limit_bytes=_MOST_PAGE_BYTES)


def read_events(run: RunDir) -> dict[str, Any]:
    """The newest events of all kinds in words, the newest first, and the number of all."""
    events: list[dict[str, Any]] = []
    total = 0
    for event in read_lines_backwards(run.events):
        if "kind" not in event:
            continue
        total += 1
        if len(events) < _MOST_EVENTS:
            words = sanitize(_words(event))
            events.append({"t": event.get("t"), "kind": event["kind"], "words": words})
    return {"events": events, "total": total}


def _words(event: dict[str, Any]) -> str:
    """The sentence of the log; of an event without one, the words of the report."""
    for describes in (describe_event, describe):
        try:
            words = describes(event)
        except (KeyError, TypeError, ValueError, AttributeError):  # of another version
            continue
        if words:
            return words
    return ""


def read_log(run: RunDir, attempt: int | None, rank: int | None) -> dict[str, Any]:
    """End of a rank's log, and which logs there are.

    Args:
        attempt: None: the newest that has logs.
        rank: None: the lowest.
    """
    attempts = _numbers(run.log(0, 0).parent.parent, "attempt-", "")
    attempt = attempts[-1] if attempt is None and attempts else attempt
    ranks = [] if attempt is None else _numbers(run.log(attempt, 0).parent, "rank-", ".log")
    rank = ranks[0] if rank is None and ranks else rank
    answer = {"attempts": attempts, "ranks": ranks, "attempt": attempt, "rank": rank}
    if attempt is None or rank is None:
        return {**answer, "text": ""}
    path = inside(run, run.log(attempt, rank))
    return {**answer, "text": "" if path is None else _tail(path)}


def _numbers(folder: Path, prefix: str, suffix: str) -> list[int]:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    found = (name.removeprefix(prefix).removesuffix(suffix) for name in names)
    return sorted(int(name) for name in found if name.isascii() and name.isdigit())


def _tail(path: Path) -> str:
    file = open_plain(path)
    try:
        offset = max(0, os.fstat(file).st_size - _MOST_LOG_BYTES)
        data = os.pread(file, _MOST_LOG_BYTES, offset)
    finally:
        os.close(file)
    whole = data.partition(b"\n")[2] if offset else data
    lines = whole.decode(errors="replace").replace("\r\n", "\n").split("\n")
    # of a progress bar the last state, as a terminal leaves it
    return sanitize("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


class SettingsCache:
    """Resolved settings of runs, each read once and again when an attempt was added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def differing(self, runs: Sequence[RunDir]) -> dict[str, Any]:
        """Settings that differ between runs.

        Returns:
            ``names``: dotted names in the order of the schema. ``runs``: of each run, its
            values in that order; null: not known.
        """
        settings = {run.run_id: self._read(run) for run in runs}
        known = [each for each in settings.values() if each]
        names = dict.fromkeys(name for each in known for name in each)
        differ = [name for name in names if len({_key(each.get(name)) for each in known}) > 1]
        rows = {
            run_id: [each.get(name) for name in differ] for run_id, each in settings.items() if each
        }
        return {"names": differ, "runs": rows}

    def _read(self, run: RunDir) -> dict[str, Any]:
        attempts = run.attempts()
        path = _settings_file(run, attempts[-1]) if attempts else None
        try:
            stat = None if path is None else path.stat()
        except OSError:
            stat = None
        if path is None or stat is None:
            return {}
        stamp = stat.st_mtime_ns, stat.st_size
        with self._lock:
            kept = self._cache.get(path)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        values = _settings(path)
        with self._lock:
            self._cache[path] = (stamp, values)
        return values


_SHARED: dict[str, Any] = {}
"""Names of settings, which all runs share."""


def _settings_file(run: RunDir, attempt: int) -> Path:
    """File of a recipe's settings, or of a script's config."""
    script = run.script(attempt)
    return script if script.is_file() else run.resolved(attempt)


def _settings(path: Path) -> dict[str, Any]:
    try:
        content = read_json_object(path)
        if path.name == "script.json":
            return {name: _plain(value) for name, value in flatten(content["config"]).items()}
        settings = content["settings"].items()
        return {
            _SHARED.setdefault(name, name): _plain(entry["value"])
            for name, entry in settings
            if name not in OWN
        }
    except (OSError, StorageError, JsonFileError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _plain(value: Any) -> Any:
    """A number, a text or a bool; of other values their JSON."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return sanitize(text)[:_MOST_SETTING_CHARACTERS]


def _key(value: Any) -> tuple[type, Any]:
    return type(value), value
