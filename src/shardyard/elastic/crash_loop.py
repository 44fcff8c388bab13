"""What a restart is worth: nothing after the same failure twice, and bad luck has a budget an hour.

The same failure: its words without their numbers, the last finished step and the newest durable
checkpoint are those of an earlier one. A process that somebody killed brings no cause of its own,
so that it is bad luck each time. The earlier failures stand in events.jsonl: an agent that joins
later, and the next attempt where a scheduler started all again, know them too.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any

from shardyard.elastic.losses import Loss, LostNode
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_lines, read_lines_backwards

HOUR_S = 3600.0
_OWN_SIGNALS = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
"""A process brings these on itself; all others come from outside."""
_LONGEST_PAUSE_S = 30.0
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Failure:
    """What ended a generation, as far as it can come again."""

    cause: str
    step: int
    """The last that was finished."""
    durable_step: int | None
    """That of the newest durable checkpoint."""

    @staticmethod
    def of(loss: Loss) -> "Failure | None":
        """None: it came from outside, so that nothing says that it comes again."""
        return Failure._of(loss.event())

    @staticmethod
    def told(event: dict[str, Any]) -> "Failure | None":
        """As ``of``, from an event worker_lost; None too where an older version wrote it."""
        return Failure._of(event) if type(event.get("step")) is int else None

    @staticmethod
    def _of(fields: dict[str, Any]) -> "Failure | None":
        signal = fields.get("signal")
        if signal is not None and signal not in _OWN_SIGNALS:
            return None
        cause = _NUMBERS.sub("#", str(fields.get("cause")))
        return Failure(cause, fields["step"], fields.get("durable_step"))


@dataclass
class Restarts:
    """Those of one node's agent in one attempt; all agents of a run come to the same verdicts."""

    limit: int
    """``elastic.max_restarts``."""
    earlier: set[Failure] = field(default_factory=set)
    is_crash_loop: bool = False
    """Whether the newest failure was an earlier one again."""
    nodes: list[str] = field(default_factory=list)
    """On which node each loss of this attempt began."""
    _times_s: list[float] = field(default_factory=list)
    _durable_step: int | None = None
    _in_vain: int = 0

    def used(self) -> int:
        """How many there were within the last hour."""
        now_s = time.monotonic()
        return sum(now_s - at_s < HOUR_S for at_s in self._times_s)

    def is_worth(self, loss: Loss | LostNode) -> bool:
        """Whether to start again after a loss."""
        self.nodes.append(loss.node)
        failure = Failure.of(loss) if isinstance(loss, Loss) else None
        self.is_crash_loop = failure in self.earlier
        if failure is not None:
            self.earlier.add(failure)
        return not self.is_crash_loop and self.used() < self.limit

    def take(self, durable_step: int | None) -> float:
        """Count a restart; returns the seconds to wait before it.

        The first one after a durable checkpoint comes at once. Each further one without another
        waits twice as long as the one before: what is wrong outside may need time to mend.
        """
        is_first = not self._times_s or durable_step != self._durable_step
        self._in_vain = 0 if is_first else self._in_vain + 1
        self._durable_step = durable_step
        self._times_s.append(time.monotonic())
        return min(_LONGEST_PAUSE_S, 2.0 ** (self._in_vain - 1)) if self._in_vain else 0.0


def earlier_failures(run: RunDir, attempt: int) -> set[Failure]:
    """Those that a restart may repeat: of this attempt, and of those that led to it unmended.

    An attempt that failed by itself (exit code 1) is started again by people alone, who may have
    mended why; one that lost a node, or was killed, by its scheduler.
    """
    found: set[Failure] = set()
    for event in read_lines(run.events):
        number = event.get("attempt")
        if event["kind"] == "worker_lost" and number is not None and number <= attempt:
            failure = Failure.told(event)
            found |= set() if failure is None else {failure}
        elif event["kind"] == "attempt_ended" and number != attempt and event.get("exit_code") == 1:
            found.clear()
    return found


def last_finished_step(run: RunDir, attempt: int, generation: int) -> int:
    """Of a generation, by metrics.jsonl; where it finished none, that of the newest checkpoint."""
    for line in read_lines_backwards(run.metrics):
        if line.get("attempt") == attempt and line.get("generation") == generation:
            return int(line["step"])
        if "eval" not in line:
            break  # of a generation before
    return durable_step(run) or 0


def durable_step(run: RunDir) -> int | None:
    """Of the newest durable checkpoint."""
    folder = run.latest_checkpoint()
    return None if folder is None else int(folder.name.rpartition("-")[2])
