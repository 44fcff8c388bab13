"""A state dict that ``torch.save`` wrote whole: FSDP1's FULL_STATE_DICT, DDP's, one process's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardyard.errors import CheckpointError
from shardyard.importers.checkpoints.pickles import load
from shardyard.importers.checkpoints.tensors import (
    STEPS,
    SourceCheckpoint,
    TensorView,
    step_in,
    top_level_names,
)


def read(path: Path) -> SourceCheckpoint:
    """Return the content of the file.

    Raises:
        CheckpointError: It holds no tensors by name, or is none.
        OSError: It cannot be read.
    """
    content = load(path)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds {type(content).__name__}, no state dict. Save model.state_dict()."
        )
    leaves = dict(leaves_of(content))
    tensors = {name: value for name, value in leaves.items() if isinstance(value, TensorView)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors: it is no checkpoint of a model.")
    kinds = top_level_names(leaves) - top_level_names(tensors)
    return SourceCheckpoint(
        format="torch.save",
        path=path,
        tensors=tensors,
        step=step_in(leaves),
        other_state=tuple(sorted(kinds - {*STEPS, "epoch"})),
    )


def leaves_of(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name -> value, of each value that is no dict or list."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from leaves_of(value, f"{path}.{number}")
    else:
        yield path, content
