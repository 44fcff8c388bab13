"""Limits of a run that node 0 enforces, watched or not.

They are launch.max_usd, launch.stop_idle_after and its block. Node 0 writes down the cost
of the run (`spent`, all attempts together) and a lack of steps (`stalled`). At a limit it
logs why (`stopping`) and requests its own stop, as a scheduler would. The run drains and
can be resumed.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median

from shardyard.config.machines import capacity_of
from shardyard.config.schema.recipe import Recipe
from shardyard.control.follow import Tail
from shardyard.errors import RequestError, StorageError
from shardyard.io.polling import poll_in_background
from shardyard.rundir.jsonl import EventWriter, read_lines_backwards
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import read_spending
from shardyard.units import format_seconds, format_usd, parse_seconds

_POLL_S = 1.0
_COUNT_EVERY_S = 60.0
"""Interval of counts. A killed node's time since its last written count is not counted."""
_QUIET_S, _TIMES_USUAL = 120.0, 20
"""No step is worth a word after so many usual ones, and not before an evaluation may be over."""
_FIRST_STEP_S = 600.0
"""Patience before the first step: weights are read, kernels compiled, no time is known."""
_RECENT_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class AttemptLimits:
    """Limits of one attempt."""

    started_s: float
    """When node 0 began, by the monotonic clock; preparation costs money too."""
    session: str
    usd_per_hour: float | None
    """Price per hour. None: not known, no cost is counted."""
    max_usd: float | None
    stop_idle_after_s: float | None
    drain_at_s: float | None = None
    """By the monotonic clock: in time before the instances of a capacity block go; None: never."""

    @staticmethod
    def of(
        recipe: Recipe, *, started_s: float, session: str, usd_per_hour: float | None
    ) -> "AttemptLimits":
        """Return the terms of a recipe."""
        launch, capacity = recipe.launch, capacity_of(recipe.cluster)
        idle, drain_at_s = launch.stop_idle_after, None
        if capacity is not None and capacity.usable_until is not None:
            left_s = capacity.usable_until - time.time()
            drain_at_s = time.monotonic() + left_s - recipe.elastic.drain_timeout_s
        return AttemptLimits(
            started_s=started_s,
            session=session,
            usd_per_hour=usd_per_hour,
            max_usd=launch.max_usd,
            stop_idle_after_s=None if idle is None else parse_seconds(idle),
            drain_at_s=drain_at_s,
        )


class LimitMonitor:
    """State of one attempt's limits between two probes."""

    def __init__(
        self, run_dir: RunDir, attempt: int, terms: AttemptLimits, *, now_s: float
    ) -> None:
        before = read_spending(run_dir)
        self._terms = terms
        self._usd_before = 0.0 if before is None else before.usd
        self._counted_s: float | None = None
        self._metrics = Tail(run_dir.metrics)
        self._metrics.read()  # of earlier attempts
        self._events = EventWriter(run_dir.events, attempt=attempt, generation=0)
        self._step: int | None = None
        self._stepped_s = now_s
        self._reported_s = 0.0
        """Seconds without a step when that was last reported."""
        self._step_times_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._is_stopping = False

    def poll(self, now_s: float) -> bool:
        """Write down what is worth it at this moment of the monotonic clock.

        Returns:
            Whether the run is to stop; once.

        Raises:
            StorageError: The events cannot be written.
        """
        self._read_steps(now_s)
        self._check_stall(now_s)
        if self._counted_s is None or now_s - self._counted_s >= _COUNT_EVERY_S:
            self.count(now_s)
        reason = None if self._is_stopping else self._stop_reason(now_s)
        if reason is None:
            return False
        self._is_stopping = True
        self._events.write("stopping", reason=reason, session=self._terms.session)
        return True

    def count(self, now_s: float) -> None:
        """Write down what the run has cost."""
        self._counted_s = now_s
        if self._terms.usd_per_hour is not None:
            usd = round(self._usd(now_s), 4)
            self._events.write("spent", usd=usd, usd_per_hour=self._terms.usd_per_hour)

    def _usd(self, now_s: float) -> float:
        hours = (now_s - self._terms.started_s) / 3600
        return self._usd_before + hours * (self._terms.usd_per_hour or 0.0)

    def _read_steps(self, now_s: float) -> None:
        for line in self._metrics.read():  # an evaluation is progress too
            self._stepped_s, self._step = now_s, line["step"]
            if line.get("step_time_s") is not None:
                self._step_times_s.append(line["step_time_s"])
                self._events.generation = line["generation"]
        if self._reported_s and self._stepped_s == now_s:
            self._reported_s = 0.0
            self._write_stall(0.0)

    def _check_stall(self, now_s: float) -> None:
        quiet_s = now_s - self._stepped_s
        usual_s = self._median_step_s()
        patience_s = _FIRST_STEP_S if usual_s is None else max(_QUIET_S, _TIMES_USUAL * usual_s)
        if quiet_s >= max(patience_s, 2 * self._reported_s):  # ever more seldom
            self._reported_s = quiet_s
            self._write_stall(quiet_s)

    def _write_stall(self, quiet_s: float) -> None:
        """No step for so long; 0: they come again."""
        seconds, usual_s = round(quiet_s, 1), self._median_step_s()
        self._events.write("stalled", step=self._step, seconds=seconds, usual_s=usual_s)

    def _median_step_s(self) -> float | None:
        return median(self._step_times_s) if self._step_times_s else None

    def _stop_reason(self, now_s: float) -> str | None:
        terms, usd = self._terms, self._usd(now_s)
        if terms.max_usd is not None and usd >= terms.max_usd and terms.usd_per_hour is not None:
            return f"it has cost {format_usd(usd)}, and launch.max_usd={terms.max_usd:g}"
        if terms.drain_at_s is not None and now_s >= terms.drain_at_s:
            return "its capacity block ends (cluster.block_ends), and EC2 ends instances before"
        quiet_s, limit_s = now_s - self._stepped_s, terms.stop_idle_after_s
        if limit_s is not None and quiet_s >= limit_s:
            return (
                f"no step for {format_seconds(quiet_s)}, and launch.stop_idle_after="
                f"{format_seconds(limit_s)}"
            )
        return None


@contextmanager
def enforce_limits(run_dir: RunDir, attempt: int, terms: AttemptLimits) -> Iterator[None]:
    """Look after an attempt while the block runs; at a limit, this process gets SIGTERM once."""
    limits = LimitMonitor(run_dir, attempt, terms, now_s=time.monotonic())

    def poll() -> None:
        with suppress(StorageError):  # a full disk is told by the training, which writes there too
            if limits.poll(time.monotonic()):
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        with poll_in_background(poll, every_s=_POLL_S, name="limits"):
            yield
    finally:
        with suppress(StorageError):
            limits.count(time.monotonic())


def check_not_stopped(run_dir: RunDir, session: str) -> None:
    """Raise if this start of the job has stopped itself, and its scheduler starts it again.

    Raises:
        RequestError: What stopped it holds still.
    """
    for event in read_lines_backwards(run_dir.events, with_any=('"stopping"',)):
        if event.get("kind") == "stopping" and event.get("session") == session:
            raise RequestError(
                f"run {run_dir.run_id} stopped itself: {event.get('reason')}. This job will not "
                f"continue it. `shardyard resume {run_dir.handle}` submits another."
            )
        return


def has_stopped_itself(run_dir: RunDir, attempt: int) -> bool:
    """Whether a limit ended an attempt."""
    events = read_lines_backwards(run_dir.events, with_any=('"stopping"',))
    return any(
        event.get("kind") == "stopping" and event.get("attempt") == attempt for event in events
    )
