"""Heartbeats of each rank in the agent's memory: its progress, and waits for other ranks.

A rank only writes, some nanoseconds a note, and the agent only reads. It never asks a worker
anything, so it sees a rank that no longer answers like every other.

Collectives are counted at the public functions of ``torch.distributed``, which FSDP2 and our
own code call by their names. A worker wraps each of them to note its begin and its end; torch
has no hook for it. Collectives inside of compiled graphs and of DTensor are not seen. Neither
is work that is waited for later (``async_op``, sends of a pipeline). On an accelerator a
collective returns as soon as it is queued: the counts are the host's progress, and compute
holds the waits.
"""

import inspect
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.compiler import is_compiling

from shardyard.elastic.shared_memory import NOTES, AgentMemory, attach
from shardyard.observe.trace import COLLECTIVE_FUNCTIONS
from shardyard.telemetry.health.ranks import group_name
from shardyard.train.hooks import Heartbeat, WorkerPhase

(
    _PID, _STEP, _PHASE, _BEGUN, _ENDED, _STEP_NS, _COMPUTE_NS, _SAVE_NS, _MOVED_NS,
) = range(9)  # fmt: skip
_RECORD = struct.Struct("9q")

STEPS_KEPT = 32
"""Newest steps kept of each rank; a look that comes later than that misses some."""
_GROUPS_KEPT = 3
"""Groups kept of a step: partial groups of ranks, whose collectives are timed apart."""
_KEPT = struct.Struct(f"{3 + 2 * _GROUPS_KEPT}q")
"""Number, compute, wait for samples; then (group, time in its collectives) of each."""
_STEP_NUMBERS = _KEPT.size // 8
_NUMBER = struct.Struct("q")
_NUMBERS = (_RECORD.size + STEPS_KEPT * _KEPT.size) // 8
_BYTES = 8 * _NUMBERS
"""Bytes of a rank."""
# Three of them fit one signed field of 64 bits, which one memory write replaces as a whole.
_PART_BITS = 20
"""Bits of each of the three numbers that name a group: first rank, last rank and size."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """The record of one rank, as the agent reads it."""

    pid: int
    """Process that wrote it; 0: none yet."""
    step: int
    """The one that is under way, or was the last."""
    phase: WorkerPhase
    collectives_started: int
    collectives_ended: int
    """Both of the training thread: one less than begun while it waits in one."""
    step_ns: int
    """Duration of the last step without evaluations and saves.

    The first step of a process is not recorded, as it is unlike the others.
    """
    compute_ns: int
    """Time of the step that the rank spent outside collectives; includes its wait for samples."""
    save_ns: int
    """Longest duration of a copy for a checkpoint or a snapshot; 0: it made none yet."""
    moved_ns: int
    """When any of these changed last, by the monotonic clock of this machine."""

    @property
    def is_in_collective(self) -> bool:
        """Whether it waits for other ranks, as far as it could note that."""
        return self.collectives_started > self.collectives_ended


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank."""

    step: int
    compute_ns: int
    """Without its waits for other ranks and for samples."""
    data_ns: int
    """Its wait for samples."""
    exchange_ns: Mapping[str, int] = field(default_factory=dict)
    """Time in collectives of groups that are not all ranks, by ``first-last-count``."""


def read_heartbeats(memory: AgentMemory | None, ranks: int) -> list[HeartbeatRecord]:
    """The records of a node's workers by local rank; empty until one of them has noted anything."""
    view = None if memory is None else memory.view()
    if view is None:
        return []
    with view:
        return [_read(view, local_rank) for local_rank in range(ranks)]


def read_steps(
    memory: AgentMemory | None, ranks: int, *, after: Sequence[int]
) -> list[list[StepRecord]]:
    """The newest steps of a node's ranks that are whole, by local rank, in order.

    Args:
        after: By local rank, the step up to which all are known.
    """
    view = None if memory is None else memory.view()
    if view is None:
        return []
    with view:
        return [_read_steps(view, rank, after=after[rank]) for rank in range(ranks)]


def clear_heartbeats(memory: AgentMemory | None) -> None:
    """Blank all records, between two generations."""
    view = None if memory is None else memory.view()
    if view is not None:
        with view:
            view[:] = bytes(len(view))


@cache
def own_heartbeat() -> Heartbeat:
    """Return the heartbeats of this worker, and record its collectives from now on.

    Outside an agent, they are not recorded.
    """
    ranks, local_rank = (int(os.environ.get(n, 0)) for n in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    memory = attach(NOTES, ranks * _BYTES) if ranks else None
    if memory is None:
        return Heartbeat()
    notes = SharedHeartbeat(memory, local_rank)
    instrument_collectives(notes)
    return notes


class SharedHeartbeat(Heartbeat):
    """One rank's own record; each number is written by itself, in one store of 8 bytes."""

    def __init__(self, memory: mmap.mmap, local_rank: int) -> None:
        self._fields = memoryview(memory).cast("q")[local_rank * _NUMBERS :]
        self._steps = self._fields[_RECORD.size // 8 : _NUMBERS]
        self._waited_ns = 0
        self._data_ns = 0
        self._exchanged_ns: dict[int, int] = {}
        """Time in exchanges of the step under way, by group."""
        self._step_started_ns = 0
        self._waited_before_step_ns = 0
        self._fields[_PID] = os.getpid()
        self.enter(WorkerPhase.SET_UP)

    def enter(self, phase: WorkerPhase) -> None:
        """Enter a phase, as in Notes."""
        self._fields[_PHASE] = phase
        self._fields[_MOVED_NS] = time.monotonic_ns()

    @contextmanager
    def during(self, phase: WorkerPhase) -> Iterator[None]:
        """Be in a phase for a while, as in Notes."""
        before = WorkerPhase(self._fields[_PHASE])
        self.enter(phase)
        began_ns = self._fields[_MOVED_NS]
        try:
            yield
        finally:
            self.enter(before)
            took_ns = self._fields[_MOVED_NS] - began_ns
            if phase is WorkerPhase.SAVE:
                self._fields[_SAVE_NS] = max(self._fields[_SAVE_NS], took_ns)
            elif phase is WorkerPhase.DATA:
                self._data_ns += took_ns

    def begin_step(self, step: int, *, is_first: bool) -> None:
        """Begin a step, as in Notes."""
        self._fields[_STEP] = step
        self.enter(WorkerPhase.FIRST_STEP if is_first else WorkerPhase.STEP)
        self._step_started_ns = self._fields[_MOVED_NS]
        self._waited_before_step_ns = self._waited_ns
        self._data_ns = 0
        self._exchanged_ns.clear()

    def end_step(self) -> None:
        """End a step, as in Notes."""
        now_ns = time.monotonic_ns()
        # A first step may compile, and the longest recent step counts for the hang budget.
        if self._fields[_PHASE] != WorkerPhase.FIRST_STEP:
            step_ns = now_ns - self._step_started_ns
            compute_ns = step_ns - (self._waited_ns - self._waited_before_step_ns)
            self._fields[_COMPUTE_NS] = compute_ns
            self._fields[_STEP_NS] = step_ns
            self._keep_step(compute_ns)
        self._fields[_MOVED_NS] = now_ns

    def _keep_step(self, compute_ns: int) -> None:
        """Its number comes last: until then the place holds no step."""
        step, steps = self._fields[_STEP], self._steps
        at = step % STEPS_KEPT * _STEP_NUMBERS
        steps[at] = 0
        steps[at + 1] = compute_ns - self._data_ns
        steps[at + 2] = self._data_ns
        groups = list(self._exchanged_ns.items())[:_GROUPS_KEPT]
        for place in range(_GROUPS_KEPT):
            group, took_ns = groups[place] if place < len(groups) else (0, 0)
            steps[at + 3 + 2 * place] = group
            steps[at + 4 + 2 * place] = took_ns
        steps[at] = step

    def begin_collective(self) -> int:
        """The training thread waits for other ranks from now on; returns when, for its end."""
        fields, now_ns = self._fields, time.monotonic_ns()
        fields[_BEGUN] += 1
        fields[_MOVED_NS] = now_ns
        return now_ns

    def end_collective(self, started_ns: int, group: int = 0) -> None:
        """It is over, or has failed.

        Args:
            group: Number of its group; 0: all ranks, or one that has no number.
        """
        fields, now_ns = self._fields, time.monotonic_ns()
        fields[_ENDED] += 1
        fields[_MOVED_NS] = now_ns
        took_ns = now_ns - started_ns
        self._waited_ns += took_ns
        if group:
            self._exchanged_ns[group] = self._exchanged_ns.get(group, 0) + took_ns


def instrument_collectives(heartbeat: SharedHeartbeat) -> None:
    """Note each collective that this thread, the training's, calls from now on."""
    for name in COLLECTIVE_FUNCTIONS:
        # Names differ between versions of torch: 2.13 renamed some of them.
        if (function := getattr(dist, name, None)) is not None:
            setattr(dist, name, _instrumented(function, heartbeat))


def _instrumented(function: Callable[..., Any], heartbeat: SharedHeartbeat) -> Callable[..., Any]:
    training_thread = get_ident()
    names = list(inspect.signature(function).parameters)
    place = names.index("group") if "group" in names else len(names)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != training_thread:  # a save's, in its own thread
            return function(*args, **kwargs)
        began_ns = heartbeat.begin_collective()
        try:
            return function(*args, **kwargs)
        finally:
            group = kwargs.get("group") if len(args) <= place else args[place]
            heartbeat.end_collective(began_ns, 0 if group is None else _number_of(group))

    return wrapper


def _number_of(group: Any) -> int:
    """By which a group is noted; 0: it is all ranks, was left, or is not evenly spread."""
    if not isinstance(group, dist.ProcessGroup):
        return 0
    if group not in _NUMBERS_OF:
        _NUMBERS_OF[group] = _number_of_ranks(_ranks_of(group))
    return _NUMBERS_OF[group]


# Weak keys: a process group that is still held somewhere aborts the process at its end.
_NUMBERS_OF: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


def _ranks_of(group: Any) -> list[int]:
    try:
        ranks = dist.get_process_group_ranks(group)
        return ranks if len(ranks) < dist.get_world_size() else []
    except (KeyError, ValueError, RuntimeError):  # no group of this process, or no more
        return []


def _number_of_ranks(ranks: list[int]) -> int:
    if group_name(ranks) is None or ranks[-1] >> _PART_BITS:
        return 0
    return ranks[0] | ranks[-1] << _PART_BITS | len(ranks) << 2 * _PART_BITS


def _name_of(number: int) -> str:
    mask = (1 << _PART_BITS) - 1
    parts = (number >> shift * _PART_BITS & mask for shift in range(3))
    return "-".join(map(str, parts))


def _read_steps(view: mmap.mmap, local_rank: int, *, after: int) -> list[StepRecord]:
    begin = local_rank * _BYTES + _RECORD.size
    found = []
    for place in range(STEPS_KEPT):
        at = begin + place * _KEPT.size
        (step,) = _NUMBER.unpack_from(view, at)
        if step <= after:
            continue
        number, compute_ns, data_ns, *groups = _KEPT.unpack_from(view, at)
        if _NUMBER.unpack_from(view, at) != (step,) or number != step:
            continue  # it is being written
        exchange_ns = {
            _name_of(group): took_ns
            for group, took_ns in zip(groups[::2], groups[1::2], strict=True)
            if group
        }
        found.append(
            StepRecord(step=step, compute_ns=compute_ns, data_ns=data_ns, exchange_ns=exchange_ns)
        )
    return sorted(found, key=lambda record: record.step)


def _read(view: mmap.mmap, local_rank: int) -> HeartbeatRecord:
    pid, step, phase, *rest = _RECORD.unpack_from(view, local_rank * _BYTES)
    begun, ended, step_ns, compute_ns, save_ns, moved_ns = rest
    return HeartbeatRecord(
        pid=pid, step=step, phase=WorkerPhase(phase), collectives_started=begun,
        collectives_ended=ended,
        step_ns=step_ns, compute_ns=compute_ns, save_ns=save_ns, moved_ns=moved_ns,
    )  # fmt: skip
