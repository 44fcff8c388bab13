"""Data of a run's folder to send: its settings, its lines as they come, and its end.

All of it follows only from the files, to the bit: sending a line again sends the same.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.errors import (
    EXIT_DRAINED,
    EXIT_INTERRUPTED,
    AccessError,
    RequestError,
    ShardyardError,
)
from shardyard.io.files import open_plain, parse_json, read_json_object
from shardyard.io.polling import backoff_s
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.metrics import axes_of, scalars_of
from shardyard.rundir.script import ScriptRequest, read_script
from shardyard.rundir.state import end_of_attempt, read_spending
from shardyard.trackers.service import AttemptEnd, AttemptMetadata, MetricsRow, Outcome, Service

_PREDICTED = {
    "parameters": "parameters",
    "step_time_s": "step_s",
    "mfu": "mfu",
    "memory_bytes": "memory_bytes",
    "checkpoint_bytes": "checkpoint_bytes",
    "wall_s": "wall_s",
    "usd": "usd",
}
"""Name that is sent -> key of plan.json."""

_RESULT = (
    "steps_done", "tokens", "loss", "eval_loss", "best_eval_loss", "tokens_per_s", "step_time_s",
    "peak_memory_bytes", "wall_s", "effective_share", "restarts", "skipped_steps",
)  # fmt: skip
"""Names of the report's numbers."""

_LOST_EXIT_CODE = 255
_PAUSES = ("evaluated", "generated", "checkpoint_started")


def read_attempt_metadata(run: RunDir, attempt: int) -> AttemptMetadata:
    """Return the task of an attempt, and the predictions for it.

    Raises:
        RequestError: resolved.json is missing or torn.
    """
    script = read_script(run, attempt)
    if script is not None:
        return _script_metadata(run, attempt, script)
    resolved = read_resolved(run.resolved(attempt))
    settings = resolved.recipe.model_dump(mode="json", exclude={"secrets": True, "launch": {"env"}})
    first, plan = next(read_lines(run.events), {}), _plan(run, attempt)
    return AttemptMetadata(
        run=run,
        attempt=attempt,
        observe=resolved.recipe.observe,
        started_t=first.get("t") or run.path.stat().st_mtime,
        attempt_t=run.resolved(attempt).stat().st_mtime,
        settings=settings,
        predicted=_numbers({name: plan.get(key) for name, key in _PREDICTED.items()}),
        tags=resolved.recipe.run.tags,
    )


def _script_metadata(run: RunDir, attempt: int, script: ScriptRequest) -> AttemptMetadata:
    attempt_t = run.script(attempt).stat().st_mtime
    return AttemptMetadata(
        run=run,
        attempt=attempt,
        observe=script.recipe().observe,
        started_t=next(read_lines(run.events), {}).get("t") or attempt_t,
        attempt_t=attempt_t,
        settings=script.config,
        predicted={},
        tags=script.tags,
    )


def end_of(run: RunDir, attempt: int, *, now_t: float) -> AttemptEnd:
    """Return the end of an attempt; lost without a final event.

    Args:
        now_t: Unix seconds, for an attempt without a final event.
    """
    said = end_of_attempt(run, attempt)
    if said is None:
        words = "it ended without a word"
        return AttemptEnd(
            outcome="lost", exit_code=_LOST_EXIT_CODE, reason=words, t=now_t, result=_result(run)
        )
    code = int(said.get("exit_code") or 0)
    usual = "drained" if code in (EXIT_DRAINED, EXIT_INTERRUPTED) else "failed"
    word = said.get("outcome", usual if code else "finished")
    outcome: Outcome = word if word in ("finished", "drained") else "failed"
    reason = str(said.get("reason", ""))
    return AttemptEnd(
        outcome=outcome, exit_code=code, reason=reason, t=said["t"], result=_result(run)
    )


class Lines:
    """Lines of metrics.jsonl as rows, as they come; each once, in order."""

    def __init__(self, run: RunDir) -> None:
        self._file = _Numbered(run.metrics)
        self._events = _Numbered(run.events)
        self._clock = Clock()
        self.seen = 0
        """Lines that were read, with something to show or without."""

    def rewind(self) -> None:
        """Begin again with the first line."""
        self._file.rewind()
        self._events.rewind()
        self._clock = Clock()
        self.seen = 0

    def read(self, *, after: int, most: int = 1000) -> list[MetricsRow]:
        """The next rows, of at most so many lines.

        Args:
            after: Leave out lines up to this number.
        """
        lines = self._file.read(most)
        # behind the lines: what was written before one of them is known
        for _, event in self._events.read():
            self._clock.update(event)
        rows = []
        for number, line in lines:
            self.seen = number
            if type(line.get("step")) is not int:
                continue
            t, values = self._clock.end_of(line), {**scalars_of(line), **axes_of(line)}
            if number > after and values:
                rows.append(MetricsRow(number=number, step=line["step"], t=t, values=values))
        return rows

    @property
    def count(self) -> int:
        """Lines that the file has now."""
        with suppress(FileNotFoundError), os.fdopen(open_plain(self._file.path), "rb") as file:
            return sum(1 for _ in file)
        return 0


class Clock:
    """When each step ended. Lines carry durations and no clock; events of the same step do."""

    def __init__(self) -> None:
        self._ready_t: dict[tuple[int, int], float] = {}
        self._first_t: dict[tuple[int, int, int], float] = {}
        self._pauses_t: dict[tuple[int, int, int], float] = {}
        self._start = (-1, -1)
        self._t = 0.0
        self._step = -1

    def update(self, event: Mapping[str, Any]) -> None:
        """Take what an event says of time."""
        kind, t = event.get("kind"), event.get("t")
        if t is None:
            return
        start = (event.get("attempt") or 0, event.get("generation") or 0)
        key = (*start, event.get("step") or 0)
        if kind in ("run_started", "attempt_started", "model_ready"):
            self._ready_t[start] = t
        elif kind == "first_step":
            self._first_t[key] = t
        elif kind in _PAUSES:
            self._pauses_t[key] = max(t, self._pauses_t.get(key, 0.0))

    def end_of(self, line: Mapping[str, Any]) -> float:
        """Unix seconds; lines are asked about in their order."""
        step = line["step"]
        if "eval" in line:  # names no start; it follows a line of its own
            return self._pauses_t.get((*self._start, step), self._t)
        start = (line.get("attempt") or 0, line.get("generation") or 0)
        if start != self._start:
            self._start, steps = start, 1
            self._t = self._ready_t.get(start, self._t)
        else:
            self._t = max(self._t, self._pauses_t.get((*start, self._step), 0.0))
            steps = max(1, step - self._step)  # a script may write a line every few steps
        self._step = step
        step_s = line.get("step_time_s") or 0.0
        self._t = self._first_t.get((*start, step)) or self._t + steps * step_s
        return self._t


class _Numbered:
    """Objects of a line file with the numbers of their lines, as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._number = 0

    def rewind(self) -> None:
        self._offset = self._number = 0

    def read(self, most: int = 1_000_000) -> list[tuple[int, dict[str, Any]]]:
        """Whole new lines; one still being written waits, a torn one counts and is left out."""
        lines: list[tuple[int, dict[str, Any]]] = []
        try:
            file = os.fdopen(open_plain(self.path), "rb")
        except FileNotFoundError:
            return []
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") or len(lines) == most:
                    break
                self._offset += len(line)
                self._number += 1
                lines.append((self._number, _object(line)))
        return lines


def _object(line: bytes) -> dict[str, Any]:
    try:
        content = parse_json(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _plan(run: RunDir, attempt: int) -> dict[str, Any]:
    try:
        return read_json_object(run.plan(attempt))
    except (OSError, ValueError):
        return {}  # a module of the user's own has none


def _result(run: RunDir) -> dict[str, float]:
    try:
        summary = summarize(read_run(run))
    except (ShardyardError, OSError):  # what was sent so far stands
        return {}
    spent = read_spending(run)
    return _numbers(
        {
            **{name: getattr(summary, name) for name in _RESULT},
            **{f"eval_{name}": value for name, value in summary.scores.items()},
            "mfu": _mfu(summary),
            "usd": None if spent is None else spent.usd,
        }
    )


def _mfu(summary: Summary) -> float | None:
    return None if summary.mfu is None else summary.mfu.get("full")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


# One service is sent what it lacks, again and again, until the run has ended.

_AGAIN_S, _AGAIN_AT_MOST_S = 5.0, 300.0
"""Seconds between tries while a service accepts no data; each time twice as long."""
_AT_END_AGAIN_S = 1.0


class Uploader:
    """Sender of one attempt to one service.

    Args:
        on_problem: Called with the reason why a service accepts no data, once until it does.
        address: Called with the address of the run, once it is visible.
    """

    def __init__(
        self,
        service: Service,
        metadata: AttemptMetadata,
        *,
        on_problem: Callable[[str], None],
        address: Callable[[str], None],
    ) -> None:
        self._service = service
        self._metadata = metadata
        self._on_problem = on_problem
        self._address = address
        self._lines = Lines(metadata.run)
        self._is_open = self._was_open = False
        self._had = 0
        """Lines that the service has had, as far as it says."""
        self._failures = 0
        self._next_s = 0.0
        """When to try again, by the monotonic clock."""
        self.problem = ""
        """Reason why it accepts no data now; empty where it does."""

    @property
    def unsent(self) -> int | None:
        """Lines that it has not; None: it keeps no count, so it may have some of them."""
        if self._was_open and not self._service.keeps_count:
            return None
        return max(0, self._lines.count - self._had)

    def poll(self) -> None:
        """Send what has come, unless the last try failed a moment ago."""
        if time.monotonic() < self._next_s:
            return
        with suppress(ShardyardError):
            self._send()

    def end(self, *, until_s: float) -> bool:
        """Send what is left, and how the attempt ended; False: it was not all taken.

        Args:
            until_s: By the monotonic clock; from then on there are no more tries.
        """
        end = end_of(self._metadata.run, self._metadata.attempt, now_t=time.time())
        while True:
            try:
                self._send()
                self._close(end)
                return True
            except (AccessError, RequestError):  # another try would not help
                return False
            except ShardyardError:
                pass  # its reason is in self.problem
            if time.monotonic() + _AT_END_AGAIN_S >= until_s:
                return False
            time.sleep(_AT_END_AGAIN_S)

    def _close(self, end: AttemptEnd) -> None:
        try:
            self._service.close(end)
        except ShardyardError as error:
            self._fail(error)
            raise

    def _send(self) -> None:
        try:
            if not self._is_open:
                self._had = self._service.open(self._metadata)
                self._lines.rewind()
                self._is_open = self._was_open = True
                self._address(self._service.address)
            self._send_lines()
        except ShardyardError as error:
            self._fail(error)
            raise
        self.problem, self._failures, self._next_s = "", 0, 0.0

    def _send_lines(self) -> None:
        while True:
            before = self._lines.seen
            rows = self._lines.read(after=self._had)
            if self._lines.seen == before:
                return
            if rows:
                self._service.send(rows)
            self._had = max(self._had, self._lines.seen)

    def _fail(self, error: ShardyardError) -> None:
        self._is_open = False  # what has come meanwhile, the service itself says best
        if not self.problem:
            self._on_problem(str(error))
        self.problem = str(error)
        wait_s = backoff_s(self._failures, first_s=_AGAIN_S, longest_s=_AGAIN_AT_MOST_S)
        self._failures += 1
        self._next_s = time.monotonic() + wait_s
