"""The steps of a script that goes on where its newest checkpoint ends, in any layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardyard.errors import RequestError
from shardyard.library.checkpoint import load_checkpoint, save_checkpoint


def steps(
    total: int,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    every: int,
    keep_last: int = 2,
) -> Iterator[int]:
    """``range(total)`` from the newest checkpoint's step on. All ranks go through it together.

    After each ``every`` steps, and after the last one, a checkpoint is written before the next step
    begins. A process that is started again, as torchrun does after a loss, loads it and goes on.
    A loop that is left by ``break`` has the checkpoints of before.

    Args:
        folder: Seen by all ranks.
        others: What else keeps state, with ``state_dict`` and ``load_state_dict``: schedulers.

    Raises:
        CheckpointError: None could be read or written, see ``load_checkpoint``.
        RequestError: ``every`` is below 1, or the checkpoint has state of another number of others.
    """
    if every < 1:
        raise RequestError(f"steps(every={every}): give 1 or more, the steps between checkpoints.")
    loaded = load_checkpoint(folder, model, optimizer)
    first = 0
    if loaded is not None:
        first, states = loaded.step, loaded.values.get("others", [])
        if len(states) != len(others):
            raise RequestError(
                f"the checkpoint in {folder} has the state of {len(states)} objects beside model "
                f"and optimizer, and steps() was given {len(others)}. Give those that it was "
                "written with, in their order, or another folder."
            )
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
    for step in range(first, total):
        yield step
        if (step + 1) % every == 0 or step + 1 == total:
            values = {"others": [other.state_dict() for other in others]}
            save_checkpoint(
                folder, model, optimizer, step=step + 1, values=values, keep_last=keep_last
            )
