"""Hooks from the elastic layer into the training loop; the loop never imports that layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from shardyard.checkpoint.staging_protocol import MemoryProvider
from shardyard.rundir.jsonl import EventWriter


class WorkerPhase(IntEnum):
    """Phase of a rank; each takes its own time."""

    SET_UP = 0
    """From the start of the process; the number of a record that was never written."""
    RESTORE = 1
    """Reads a checkpoint."""
    FIRST_STEP = 2
    """First step of a process: compiles, and takes the memory that later steps use again.

    Or a profiled step: neither is a measure of the others.
    """
    DATA = 3
    """Waits for the samples of a step."""
    STEP = 4
    EVALUATE = 5
    SAVE = 6
    """Copies the state, for a checkpoint or a snapshot."""
    WRITE = 7
    """Waits until all ranks have written a checkpoint."""
    FINISH = 8
    """After the last step."""
    PROFILE = 9
    """Starts a profile, or writes it."""

    @property
    def words(self) -> str:
        """Name of the phase for people."""
        return self.name.lower().replace("_", " ")


class Heartbeat:
    """Heartbeat of a rank for outside observers; this one discards it."""

    def enter(self, phase: WorkerPhase) -> None:
        """Be at this phase from now on."""

    @contextmanager
    def during(self, phase: WorkerPhase) -> Iterator[None]:  # noqa: ARG002
        """Be at a phase while it is open, and then at the one before again."""
        yield

    def begin_step(self, step: int, *, is_first: bool) -> None:
        """A step of this number begins, with its wait for samples; ``is_first`` of the process, or
        as unlike the others because it is profiled."""

    def end_step(self) -> None:
        """It is over, as far as this process waits for it."""


_NO_NOTES = Heartbeat()


def _nothing(_step: int) -> None:
    """Leave this process as it is: no drill has chosen it."""


@dataclass(frozen=True)
class Faults:
    """Faults by which a drill breaks the training of this process."""

    gradient_steps: frozenset[int] = frozenset()
    """NaN in a gradient, before the step is judged."""
    weight_steps: frozenset[int] = frozenset()
    """NaN in a weight, after the step."""
    bit_steps: frozenset[int] = frozenset()
    """A bit of a weight turned over, after the step."""
    before_step: Callable[[int], None] = _nothing
    """Called with each step before it is done; it may raise, hang, or end the process."""


def no_memory(_label: str, _size_bytes: int | None = None, /) -> None:
    """Hold no memory: no agent owns memory that outlives this process."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Connections of the loop: drain requests in, reports out."""

    generation: int
    """Membership inside the attempt that this process belongs to."""
    drain_requested: Callable[[], bool]
    """Whether this process was asked to finish its step, save and leave."""
    events: EventWriter | None
    """Writes events.jsonl; rank 0 has it, the others do not."""
    memory: MemoryProvider = no_memory
    """The node's memory that outlives this process, by label."""
    faults: Faults = Faults()
    """Faults that a drill requests; none in a real run."""
    heartbeat: Heartbeat = _NO_NOTES
    """Heartbeat of the rank; without an agent it is discarded."""
