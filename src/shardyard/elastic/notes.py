"""What each rank notes in the agent's memory: how far it is, and whether it waits for the others.

A rank only writes, some nanoseconds a note, and the agent only reads: it never asks a worker
anything, so a rank that cannot answer any more is seen like every other.

Collectives are counted at the public functions of ``torch.distributed``, which FSDP2 and our own
code call by their names: in a worker each of them is put into one that notes its begin and its end.
Torch has no hook for it. Not seen are those inside of compiled graphs and of DTensor, and work that
is waited for later (``async_op``, sends of a pipeline). On an accelerator a collective returns as
soon as it is queued: there the counts say how far the host is, and compute holds the waits.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from mmap import mmap
from threading import get_ident
from typing import Any

import torch.distributed as dist
from torch.compiler import is_compiling

from shardyard.elastic.agent_memory import NOTES, AgentMemory, attach
from shardyard.train.hooks import Notes, Phase

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""Public functions of torch.distributed in which a rank waits for others; no version has all."""

(
    _PID, _STEP, _PHASE, _BEGUN, _ENDED, _STEP_NS, _COMPUTE_NS, _COMPUTED_NS, _SAVE_NS, _MOVED_NS,
) = range(10)  # fmt: skip
_RECORD = struct.Struct("10q")
_NUMBERS = _RECORD.size // 8


@dataclass(frozen=True, kw_only=True)
class RankNotes:
    """The record of one rank, as the agent reads it."""

    pid: int
    """Who wrote it; 0: nobody yet."""
    step: int
    """The one that is under way, or was the last."""
    phase: Phase
    collectives_begun: int
    collectives_ended: int
    """Both of the training thread: one less than begun while it waits in one."""
    step_ns: int
    """How long the last step took, evaluations and saves left out; the first of a process is not
    told, as it is unlike the others."""
    compute_ns: int
    """What of it the rank did not spend in collectives; its wait for samples is in it."""
    computed_ns: int
    """The same of all steps that this process has told so far."""
    save_ns: int
    """How long the longest copy for a checkpoint or a snapshot took; 0: it made none yet."""
    moved_ns: int
    """When any of these changed last, by the monotonic clock of this machine."""

    @property
    def is_in_collective(self) -> bool:
        """Whether it waits for other ranks, as far as it could note that."""
        return self.collectives_begun > self.collectives_ended


def read_notes(memory: AgentMemory | None, ranks: int) -> list[RankNotes]:
    """The records of a node's workers by local rank; empty until one of them has noted anything."""
    view = None if memory is None else memory.view()
    if view is None:
        return []
    with view:
        return [_read(view, local_rank) for local_rank in range(ranks)]


def forget_notes(memory: AgentMemory | None) -> None:
    """Blank all records, between two generations."""
    view = None if memory is None else memory.view()
    if view is not None:
        with view:
            view[:] = bytes(len(view))


@cache
def own_notes() -> Notes:
    """Where this worker notes what it does, from now on its collectives too; outside an agent,
    nowhere."""
    ranks, local_rank = (int(os.environ.get(n, 0)) for n in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    memory = attach(NOTES, ranks * _RECORD.size) if ranks else None
    if memory is None:
        return Notes()
    notes = WrittenNotes(memory, local_rank)
    note_collectives(notes)
    return notes


class WrittenNotes(Notes):
    """One rank's own record; each number is written by itself, in one store of 8 bytes."""

    def __init__(self, memory: mmap, local_rank: int) -> None:
        self._fields = memoryview(memory).cast("q")[local_rank * _NUMBERS :]
        self._waited_ns = 0
        self._step_began_ns = 0
        self._waited_before_step_ns = 0
        self._fields[_PID] = os.getpid()
        self.enter(Phase.SET_UP)

    def enter(self, phase: Phase) -> None:
        """As in Notes."""
        self._fields[_PHASE] = phase
        self._fields[_MOVED_NS] = time.monotonic_ns()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """As in Notes."""
        before = Phase(self._fields[_PHASE])
        self.enter(phase)
        began_ns = self._fields[_MOVED_NS]
        try:
            yield
        finally:
            self.enter(before)
            if phase is Phase.SAVE:
                took_ns = self._fields[_MOVED_NS] - began_ns
                self._fields[_SAVE_NS] = max(self._fields[_SAVE_NS], took_ns)

    def begin_step(self, step: int, *, is_first: bool) -> None:
        """As in Notes."""
        self._fields[_STEP] = step
        self.enter(Phase.FIRST_STEP if is_first else Phase.STEP)
        self._step_began_ns = self._fields[_MOVED_NS]
        self._waited_before_step_ns = self._waited_ns

    def end_step(self) -> None:
        """As in Notes."""
        now_ns = time.monotonic_ns()
        if self._fields[_PHASE] != Phase.FIRST_STEP:
            step_ns = now_ns - self._step_began_ns
            compute_ns = step_ns - (self._waited_ns - self._waited_before_step_ns)
            self._fields[_COMPUTE_NS] = compute_ns
            self._fields[_COMPUTED_NS] += compute_ns
            self._fields[_STEP_NS] = step_ns
        self._fields[_MOVED_NS] = now_ns

    def begin_collective(self) -> int:
        """The training thread waits for other ranks from now on; returns when, for its end."""
        fields, now_ns = self._fields, time.monotonic_ns()
        fields[_BEGUN] += 1
        fields[_MOVED_NS] = now_ns
        return now_ns

    def end_collective(self, began_ns: int) -> None:
        """It is over, or has failed."""
        fields, now_ns = self._fields, time.monotonic_ns()
        fields[_ENDED] += 1
        fields[_MOVED_NS] = now_ns
        self._waited_ns += now_ns - began_ns


def note_collectives(notes: WrittenNotes) -> None:
    """Note each collective that this thread, the training's, calls from now on."""
    for name in COLLECTIVES:
        if (function := getattr(dist, name, None)) is not None:
            setattr(dist, name, _noted(function, notes))


def _noted(function: Callable[..., Any], notes: WrittenNotes) -> Callable[..., Any]:
    training_thread = get_ident()

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != training_thread:  # a save's, in its own thread
            return function(*args, **kwargs)
        began_ns = notes.begin_collective()
        try:
            return function(*args, **kwargs)
        finally:
            notes.end_collective(began_ns)

    return noted


def _read(view: mmap, local_rank: int) -> RankNotes:
    pid, step, phase, *rest = _RECORD.unpack_from(view, local_rank * _RECORD.size)
    begun, ended, step_ns, compute_ns, computed_ns, save_ns, moved_ns = rest
    return RankNotes(
        pid=pid, step=step, phase=Phase(phase), collectives_begun=begun, collectives_ended=ended,
        step_ns=step_ns, compute_ns=compute_ns, computed_ns=computed_ns, save_ns=save_ns,
        moved_ns=moved_ns,
    )  # fmt: skip
