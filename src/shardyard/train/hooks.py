"""What the elastic layer hands to the training loop; the loop never imports that layer."""

from collections.abc import Callable
from dataclasses import dataclass

from shardyard.rundir.lines import EventWriter


@dataclass(frozen=True)
class Faults:
    """Steps at which a drill breaks the training, on every rank."""

    gradient_steps: frozenset[int] = frozenset()
    """NaN in a gradient, before the step is judged."""
    weight_steps: frozenset[int] = frozenset()
    """NaN in a weight, after the step."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """How the loop learns of a drain, and where it reports."""

    generation: int
    """Membership inside the attempt that this process belongs to."""
    drain_requested: Callable[[], bool]
    """Whether this process was asked to finish its step, save and leave."""
    events: EventWriter | None
    """Writes events.jsonl; rank 0 has it, the others do not."""
    faults: Faults = Faults()
    """What a drill asks for; nothing in a real run."""
