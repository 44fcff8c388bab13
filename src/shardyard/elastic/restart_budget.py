"""Value of a restart: none after the same failure twice; bad luck has a budget per hour.

Two failures are the same if their words match without numbers and their last finished step is
equal. The run must not have passed that step in between. Checkpoints and snapshots do not
matter: both hold steps up to the one that fails. For a hang, rank, step and phase are compared.
A process that somebody killed or stopped brings no cause of its own, so it is bad luck each
time. The earlier failures are in events.jsonl. An agent that joins later reads them there, and
so does the next attempt where a scheduler restarted all.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardyard.elastic.hang_watch import Activity, Hang
from shardyard.elastic.worker_failures import OWN_SIGNALS, Loss, LostNode
from shardyard.io.polling import backoff_s
from shardyard.rundir.jsonl import read_lines, read_lines_backwards
from shardyard.rundir.layout import RunDir

HOUR_S = 3600.0
_OWN_HANGS = (Activity.COMPUTING, Activity.SLEEPING, Activity.WAITING)
"""Activities that a rank is itself the cause of.

In others, its process was stopped, or its storage or processor failed it from outside.
"""
_AT_STEP = ("worker_lost", "checkpoint_loaded", "snapshot_restored", "checkpoint_durable")
"""Kinds of events whose ``step`` the run had finished."""
# In JSON quotes, so that events.jsonl is searched for them without parsing each line.
_GOES_ON = ('"checkpoint_loaded"', '"snapshot_restored"')
_LONGEST_PAUSE_S = 30.0
# Addresses, ports and process ids differ between two failures of the same cause.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Failure:
    """Cause of a generation's end, as far as it can happen again."""

    cause: str
    step: int
    """The last that was finished."""

    @staticmethod
    def of(loss: Loss, hangs: Sequence[Hang] = ()) -> "Failure | None":
        """Return the failure behind a loss; None if it came from outside and need not repeat.

        Args:
            hangs: Hangs that the loss ended.
        """
        if hangs:
            first = min(hangs, key=lambda hang: hang.rank or 0)
            return Failure._of_hang(first.event(), step=loss.step)
        return Failure._of(loss.event())

    @staticmethod
    def from_event(event: dict[str, Any]) -> "Failure | None":
        """Return the failure of an event, like ``of``; None too where an older version wrote it."""
        if event["kind"] == "worker_hung" and type(event.get("finished_step")) is int:
            return Failure._of_hang(event, step=event["finished_step"])
        is_told = event["kind"] == "worker_lost" and type(event.get("step")) is int
        return Failure._of(event) if is_told else None

    @staticmethod
    def _of(fields: Mapping[str, Any]) -> "Failure | None":
        signal = fields.get("signal")
        is_own = signal in OWN_SIGNALS or fields.get("is_out_of_memory")
        if signal is not None and not is_own:
            return None
        return Failure(_NUMBERS.sub("#", str(fields.get("cause"))), fields["step"])

    @staticmethod
    def _of_hang(fields: Mapping[str, Any], *, step: int) -> "Failure | None":
        if fields["doing"] not in _OWN_HANGS:
            return None
        who = "all ranks" if fields["rank"] is None else f"rank {fields['rank']}"
        return Failure(f"{who} hung in step {fields['step']}, {fields['phase']}", step)


@dataclass
class RestartBudget:
    """Restarts of one node's agent in one attempt; all agents of a run reach the same verdicts."""

    limit: int
    """``elastic.max_restarts``."""
    earlier: set[Failure] = field(default_factory=set)
    is_crash_loop: bool = False
    """Whether the newest failure was an earlier one again."""
    _times_s: list[float] = field(default_factory=list)
    _durable_step: int | None = None
    _without_progress: int = 0

    def used(self) -> int:
        """Return the number of restarts within the last hour."""
        now_s = time.monotonic()
        return sum(now_s - at_s < HOUR_S for at_s in self._times_s)

    def should_restart(
        self,
        loss: Loss | LostNode,
        *,
        finished_step: int,
        hangs: Sequence[Hang] = (),
        is_of_node: bool = False,
    ) -> bool:
        """Return whether to restart after a loss.

        Args:
            finished_step: The last of the generation; failures before it did not come again.
            hangs: Hangs that the loss ended.
            is_of_node: Whether the failure may not repeat on other nodes, with which the run
                can continue: that is tried before the run is given up.
        """
        failure = Failure.of(loss, hangs) if isinstance(loss, Loss) else None
        self.earlier = _not_passed(self.earlier, finished_step)
        self.is_crash_loop = failure in self.earlier and not is_of_node
        if failure is not None:
            self.earlier.add(failure)
        return not self.is_crash_loop and self.used() < self.limit

    def refund(self, number: int) -> None:
        """Count the newest restarts no more: what they were taken for is gone."""
        del self._times_s[max(0, len(self._times_s) - number) :]

    def record_restart(self, durable_step: int | None) -> float:
        """Count a restart; returns the seconds to wait before it.

        The first one after a durable checkpoint comes at once. Each further one without another
        waits twice as long as the preceding one: an outside problem may need time to end.
        """
        is_first = not self._times_s or durable_step != self._durable_step
        self._without_progress = 0 if is_first else self._without_progress + 1
        self._durable_step = durable_step
        self._times_s.append(time.monotonic())
        if not self._without_progress:
            return 0.0
        return backoff_s(self._without_progress - 1, first_s=1.0, longest_s=_LONGEST_PAUSE_S)


def earlier_failures(run: RunDir, attempt: int) -> set[Failure]:
    """Return the failures that a restart may repeat, of this attempt and its predecessors.

    An attempt that failed by itself (exit code 1) is restarted only by people, who may have
    fixed the cause: failures up to its end do not count. A scheduler restarts an attempt that
    lost a node or was killed.
    """
    failures: set[Failure] = set()
    for event in read_lines(run.events):
        number, kind, step = event.get("attempt"), event["kind"], event.get("step")
        if number is None or number > attempt:
            continue
        if kind == "attempt_ended" and number != attempt and event.get("exit_code") == 1:
            failures.clear()
        if kind in _AT_STEP and type(step) is int:
            failures = _not_passed(failures, step)
        if (failure := Failure.from_event(event)) is not None:
            failures.add(failure)
    return failures


def _not_passed(failures: set[Failure], step: int) -> set[Failure]:
    """Keep the failures that the run has not passed, once it has finished a step."""
    return {each for each in failures if each.step >= step}


def last_finished_step(run: RunDir, attempt: int, generation: int) -> int:
    """Return the last step that a generation finished, by metrics.jsonl; else its first one.

    Without a finished step, this is the step from which it continued.
    """
    for line in read_lines_backwards(run.metrics):
        if line.get("attempt") == attempt and line.get("generation") == generation:
            return int(line["step"])
        if "eval" not in line:
            break  # of a generation before
    for event in read_lines_backwards(run.events, with_any=_GOES_ON):
        if event["kind"] in ("checkpoint_loaded", "snapshot_restored"):
            is_its_own = (event.get("attempt"), event.get("generation")) == (attempt, generation)
            if is_its_own:
                return int(event["step"])
            break
    return durable_step(run) or 0


def steps_done(run: RunDir, attempt: int, generation: int, *, most: int) -> int:
    """Steps of a generation in metrics.jsonl; counts no further than ``most``."""
    count = 0
    for line in read_lines_backwards(run.metrics):
        if count == most or (line.get("attempt"), line.get("generation")) != (attempt, generation):
            break
        count += "eval" not in line
    return count


def durable_step(run: RunDir) -> int | None:
    """Return the step of the newest durable checkpoint."""
    folder = run.latest_checkpoint()
    return None if folder is None else int(folder.name.rpartition("-")[2])
