"""Looks at the notes of a node's ranks ten times a second: has none of them moved for too long?

How long is too long depends on what a rank is at. A usual step is learned from those before it. A
rank that is stopped is never all right; one that waits for storage may be, for a long time.
"""

import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, assert_never

from shardyard.config.rules.timeouts import hang_min_s, hang_slow_s
from shardyard.config.schema.recipe import Elastic
from shardyard.elastic.heartbeat import HeartbeatRecord
from shardyard.elastic.pauses import PauseDetector
from shardyard.elastic.process_inspection import (
    RUNS,
    STOPPED,
    WAITS_FOR_STORAGE,
    Frame,
    ProcessState,
    process_state,
)
from shardyard.train.hooks import WorkerPhase

# ``culprits`` finds the rank that hangs, by the heartbeats and the process states of all ranks.
#
# When no rank moves, most of them wait in a collective for the one that hangs. That one is stopped,
# waits for storage, computes or sleeps, but it is in no collective.

_WAITING_FILES = ("/torch/distributed/", "/shardyard/parallel/pipeline.py")
_WAITING_FUNCTIONS = {("/shardyard/train/step.py", "read")}
"""Functions in which a rank waits for others and cannot record it.

These are torch's own collectives of a pipeline, and on an accelerator the end of queued work.
"""


class Activity(StrEnum):
    """Activity of a rank that does not move."""

    STOPPED = "stopped"
    STORAGE = "storage"
    """Or a device's driver: uninterruptible."""
    WAITING = "waiting"
    """For other ranks."""
    COMPUTING = "computing"
    STARVED = "starved"
    """Ready to continue, but without a processor."""
    SLEEPING = "sleeping"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank, seen from outside."""

    rank: int
    node: str
    pid: int
    step: int
    phase: str
    quiet_s: float
    """Since it moved last."""
    is_overdue: bool
    """For what it is at."""
    is_long_overdue: bool
    """Whether it is long overdue for any activity."""
    doing: Activity
    where: str | None
    """Innermost Python code of its main thread; None: it did not answer."""
    collective: str | None
    """Collective in which it waits for other ranks; None: it does not wait for them."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that the others wait for."""

    rank: int | None
    """None: all wait for each other, and none is to blame; the rest is of the lowest rank."""
    node: str
    pid: int
    step: int
    phase: str
    collective: str | None
    """Collective in which the others wait; None: no rank waits."""
    doing: Activity
    reason: str
    quiet_s: float

    def event(self) -> dict[str, Any]:
        """Fields of the event worker_hung."""
        fields = asdict(self)
        fields["seconds"] = round(fields.pop("quiet_s"), 3)
        return fields

    @property
    def cause(self) -> str:
        """Describe the cause of the loss that ends this hang."""
        return f"hung for {self.quiet_s:.1f} s in step {self.step}, {self.phase}: {self.reason}"


def culprits(statuses: Sequence[RankStatus]) -> list[Hang]:
    """The ranks that hang; none while what they do may be right.

    Args:
        statuses: At every rank, of all nodes.
    """
    # A stopped process is at fault whatever the others do. Otherwise one rank that may be right
    # excuses all, as the others may wait for it.
    stopped = [look for look in statuses if look.doing is Activity.STOPPED and look.is_overdue]
    if not stopped and not all(look.is_overdue for look in statuses):
        return []
    waiting = [look for look in statuses if look.doing is Activity.WAITING]
    blamed = stopped or [look for look in statuses if look.doing is not Activity.WAITING]
    if blamed and (stopped or waiting):
        collective = next((look.collective for look in waiting if look.collective), None)
        return [_hang(look, others=len(waiting), collective=collective) for look in blamed]
    # no rank waits for another, or each for each: a long step of all, or a slow network
    if not all(look.is_long_overdue for look in statuses):
        return []
    if blamed:
        return [_hang(look, others=0, collective=None) for look in blamed]
    first = min(statuses, key=lambda status: status.rank)
    return [replace(_hang(first, others=0, collective=first.collective), rank=None)]


def _hang(status: RankStatus, *, others: int, collective: str | None) -> Hang:
    return Hang(
        rank=status.rank,
        node=status.node,
        pid=status.pid,
        step=status.step,
        phase=status.phase,
        collective=collective,
        doing=status.doing,
        reason=_reason(status, others=others, collective=collective),
        quiet_s=status.quiet_s,
    )


def waits_in(stack: Sequence[Frame]) -> str | None:
    """Return the collective in which a stack, innermost frame first, waits for other ranks.

    None: it does not wait for them.
    """
    if not stack:
        return None
    is_waiting = any(part in stack[0].file for part in _WAITING_FILES) or any(
        stack[0].file.endswith(file) and stack[0].function == function
        for file, function in _WAITING_FUNCTIONS
    )
    if not is_waiting:
        return None
    names = (f.function for f in stack if f.file.endswith("/distributed_c10d.py"))
    return next(names, stack[0].function)


def _reason(status: RankStatus, *, others: int, collective: str | None) -> str:
    where = "" if status.where is None else f" in {status.where}"
    match status.doing:
        case Activity.STOPPED:
            what = "its process is stopped, as by SIGSTOP"
        case Activity.STORAGE:
            what = "it waits for storage or for a device's driver, and hears no signal"
        case Activity.COMPUTING:
            what = f"it computes{where}, in no collective"
        case Activity.STARVED:
            what = "it gets no processor: too many processes want one"
        case Activity.SLEEPING:
            what = f"it sleeps or waits{where}, in no collective"
        case Activity.WAITING:
            return (
                f"every rank waits for others in {status.collective or 'a collective'}: a broken "
                "network, or ranks that call different collectives"
            )
        case _:
            assert_never(status.doing)
    if not others:
        return what
    wait = "1 other rank waits" if others == 1 else f"{others} other ranks wait"
    return f"{what}; {wait} for it" + (f" in {collective}" if collective else "")


_LEARNED_STEPS = 32
_LONGEST_FACTOR = 2.0
"""A step that came once may come again, and a little longer."""
_EVALUATION_FACTOR = 3.0
_SAVE_FACTOR = 5.0
_SAVE_LEAST_S = 90.0
"""A copy may wait for memory, for threads that yield to training on a loaded machine, and for a
minute until a neighbour has the snapshot before (``checkpoint/snapshots/take.py``)."""
_LONGEST_GAP_S = 0.5
"""Between two looks: of a longer one this node itself was held up, and so perhaps its ranks."""
_BUSY_SHARE = 0.2
"""Least share of a processor that counts as computing."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Longest times without a move of any rank."""

    least_s: float
    steps: float
    """Usual steps."""
    slow_s: float
    """In what is no usual step, or in one that is held up by storage."""
    compiles: bool
    """Whether a step may be compiled again at any time: then a rank that computes may be right."""

    @classmethod
    def of(cls, elastic: Elastic, *, compiles: bool) -> "Budgets | None":
        """Return the budgets of a recipe; None if it does not look for hangs."""
        if elastic.hang_steps is None:
            return None
        return cls(
            least_s=hang_min_s(elastic),
            steps=elastic.hang_steps,
            slow_s=hang_slow_s(elastic),
            compiles=compiles,
        )


@dataclass
class RankTracker:
    """Observations of one rank; every rank of the node has one."""

    heartbeat: HeartbeatRecord | None = None
    """None: it has not noted anything."""
    quiet_s: float = 0.0
    """Since it moved last; time in which this node itself stood still is not counted."""
    cpu_s: float = 0.0
    """Processor time since then."""
    letters: set[str] = field(default_factory=set)
    """States of the process since then."""
    letter: str = ""
    """State of the process at the newest look."""
    _cpu_before_s: float = 0.0

    def update(
        self, heartbeat: HeartbeatRecord | None, state: ProcessState | None, *, gap_s: float
    ) -> bool:
        """Take in what is seen now; returns whether it has moved."""
        # A rank without a heartbeat or a process counts as moved: there is nothing to judge yet.
        has_moved = heartbeat is None or state is None or heartbeat != self.heartbeat
        self.heartbeat = heartbeat
        if has_moved or state is None:
            self.quiet_s, self.cpu_s, self.letters = 0.0, 0.0, set()
            self._cpu_before_s = 0.0 if state is None else state.cpu_s
            self.letter = "" if state is None else state.letter
            return True
        self.quiet_s += gap_s
        self.cpu_s = state.cpu_s - self._cpu_before_s
        self.letter = state.letter
        self.letters.add(state.letter)
        return False

    def activity(self, *, waits: bool = False) -> Activity:
        """Return the activity of a rank while it does not move.

        Args:
            waits: The rank is known to wait for other ranks, though it has not recorded it.
        """
        # First: a rank that was stopped inside a collective holds up the others too.
        if self.letter == STOPPED:
            return Activity.STOPPED
        if waits or (self.heartbeat is not None and self.heartbeat.is_in_collective):
            return Activity.WAITING
        # At any probe since it moved: between two waits for storage a process may run.
        if WAITS_FOR_STORAGE in self.letters:
            return Activity.STORAGE
        if self.quiet_s and self.cpu_s / self.quiet_s > _BUSY_SHARE:
            return Activity.COMPUTING
        return Activity.STARVED if self.letter == RUNS else Activity.SLEEPING


class HangWatch:
    """One generation's ranks of this node. The main thread looks, the agent's thread judges."""

    def __init__(
        self,
        budgets: Budgets,
        *,
        read: Callable[[], Sequence[HeartbeatRecord]],
        pids: Sequence[int],
        state_of: Callable[[int], ProcessState | None] = process_state,
    ) -> None:
        """Args:
        read: Returns heartbeats by local rank; none until a rank has written one.
        pids: Process ids of the workers, by local rank.
        """
        self._budgets = budgets
        self._read, self._state_of = read, state_of
        self._pids = pids
        self._steps_s: deque[float] = deque(maxlen=_LEARNED_STEPS)
        self._latest_step_ns = 0
        self._longest_evaluation_s = 0.0
        self._evaluating_s = 0.0
        self._last_poll_s: float | None = None
        self._lock = threading.Lock()
        self._ranks = [RankTracker() for _ in pids]
        self.pauses = PauseDetector(len(pids))
        self.moves = 0
        """Number of times that a rank was seen to have moved."""

    def poll(self, now_s: float) -> None:
        """Look at every rank; ``now_s`` by the monotonic clock."""
        before_s, self._last_poll_s = self._last_poll_s, now_s
        gap_s = 0.0 if before_s is None else min(now_s - before_s, _LONGEST_GAP_S)
        records: Sequence[HeartbeatRecord | None] = self._read() or [None] * len(self._pids)
        with self._lock:
            for watched, pid, notes in zip(self._ranks, self._pids, records, strict=True):
                is_its_own = notes is not None and notes.pid == pid  # not of a process before it
                state = self._state_of(pid)
                self.moves += watched.update(notes if is_its_own else None, state, gap_s=gap_s)
            self._learn(gap_s)
        self.pauses.take(now_s, [watched.letter == STOPPED for watched in self._ranks])

    def step_of(self, local_rank: int) -> int:
        """The one that a rank is at; 0: it has noted none."""
        with self._lock:
            notes = self._ranks[local_rank].heartbeat
        return 0 if notes is None else notes.step

    def is_suspicious(self) -> bool:
        """Whether a rank is stopped, or none of this node has moved for too long."""
        with self._lock:
            overdue = [self._is_overdue(each, each.activity()) for each in self._ranks]
            is_stopped = [each.activity() is Activity.STOPPED for each in self._ranks]
        return all(overdue) or any(map(all, zip(overdue, is_stopped, strict=True)))

    def statuses(
        self, ranks: Sequence[int], node: str, stacks: Mapping[int, Sequence[Frame]]
    ) -> list[RankStatus]:
        """Return the observations of each rank.

        Args:
            ranks: Their global numbers, by local rank.
            stacks: Stacks of the main threads that answered, by process.
        """
        with self._lock:
            return [
                self._status_of(watched, pid, rank, node, stacks.get(pid, ()))
                for watched, pid, rank in zip(self._ranks, self._pids, ranks, strict=True)
            ]

    def _status_of(
        self, watched: RankTracker, pid: int, rank: int, node: str, stack: Sequence[Frame]
    ) -> RankStatus:
        collective = waits_in(stack)
        doing = watched.activity(waits=collective is not None)
        notes = watched.heartbeat
        return RankStatus(
            rank=rank,
            node=node,
            pid=pid,
            step=0 if notes is None else notes.step,
            phase=WorkerPhase.SET_UP.words if notes is None else notes.phase.words,
            quiet_s=watched.quiet_s,
            is_overdue=self._is_overdue(watched, doing),
            is_long_overdue=watched.quiet_s >= self._budgets.slow_s,
            doing=doing,
            where=str(stack[0]) if stack else None,
            collective=collective,
        )

    def _is_overdue(self, watched: RankTracker, activity: Activity) -> bool:
        return watched.heartbeat is not None and watched.quiet_s >= self._budget_s(
            watched.heartbeat, activity
        )

    def _budget_s(self, heartbeat: HeartbeatRecord, activity: Activity) -> float:
        """Return the longest time that a rank may spend on its current activity."""
        budgets = self._budgets
        if activity is Activity.STOPPED:
            return budgets.least_s
        is_excused = activity in (Activity.STORAGE, Activity.STARVED) or (
            budgets.compiles and activity is Activity.COMPUTING
        )
        # While no usual step is known, only the slow budget is safe.
        if is_excused or not self._steps_s:
            return budgets.slow_s
        usual_s = max(
            budgets.least_s,
            budgets.steps * statistics.median(self._steps_s),
            _LONGEST_FACTOR * max(self._steps_s),
        )
        if activity is Activity.WAITING or heartbeat.phase is WorkerPhase.STEP:
            return min(usual_s, budgets.slow_s)
        if heartbeat.phase is WorkerPhase.EVALUATE and self._longest_evaluation_s:
            usual_s = max(usual_s, _EVALUATION_FACTOR * self._longest_evaluation_s)
            return min(usual_s, budgets.slow_s)
        if heartbeat.phase is WorkerPhase.SAVE and heartbeat.save_ns:
            longest_s = _SAVE_FACTOR * heartbeat.save_ns / 1e9
            return min(max(usual_s, _SAVE_LEAST_S, longest_s), budgets.slow_s)
        # Set-up and restore read from memory in one generation and from remote storage in the next,
        # so earlier ones do not tell how long they may take.
        return budgets.slow_s

    def _learn(self, gap_s: float) -> None:
        """From one rank: how long steps and evaluations are, they are for all."""
        notes = self._ranks[0].heartbeat
        if notes is None:
            return
        if notes.step_ns != self._latest_step_ns:
            self._latest_step_ns = notes.step_ns
            self._steps_s.append(notes.step_ns / 1e9)
        if notes.phase is WorkerPhase.EVALUATE:
            self._evaluating_s += gap_s
        elif self._evaluating_s:
            self._longest_evaluation_s = max(self._longest_evaluation_s, self._evaluating_s)
            self._evaluating_s = 0.0
