"""What is found in a checkpoint, whatever wrote it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardyard.importers.checkpoints.stored import Stored

STEPS = ("step", "global_step", "global_steps", "iteration")
"""How the number of the last step is called."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Tensors by name, and what is there beside them."""

    format: str
    """In words."""
    path: Path
    tensors: Mapping[str, Stored]
    step: int | None
    """After which it was saved; None: it does not say."""
    beside: tuple[str, ...] = ()
    """What is there and is no weight, such as an optimizer's state, as far as it is not among the
    tensors."""
    remarks: tuple[str, ...] = field(default=())
    """What whoever imports it should know."""


def step_in(values: Mapping[str, object]) -> int | None:
    """The step that a checkpoint's loose values name."""
    for name in STEPS:
        found = [
            value
            for key, value in values.items()
            if key.rpartition(".")[2] == name and type(value) is int
        ]
        if found:
            return int(found[0])
    return None


def first_words(names: Iterable[str]) -> set[str]:
    """What dotted names begin with."""
    return {name.partition(".")[0] for name in names}
