"""Functions of the user's own that tests name in recipes, and the same as a plain loop has them."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def smoothed(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy with smoothed labels, and the square of the log of the sum as in PaLM."""
    logits, targets = outputs.flatten(0, -2), batch["targets"].flatten()
    losses = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=0.1
    )
    counts = targets != IGNORED
    return losses + 1e-2 * (logits.logsumexp(-1) ** 2 * counts).sum(), counts.sum()


def hits(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens that are guessed, and those that are predicted, of each sample."""
    counts = batch["targets"] != IGNORED
    right = (outputs.argmax(-1) == batch["targets"]) & counts
    return right.sum(1), counts.sum(1)


def longest(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    """One value a sample: the largest logit."""
    return outputs.amax((1, 2))


def of_images(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Sum of squared errors of the probabilities: Brier."""
    wanted = F.one_hot(batch["label"], outputs.shape[1])
    return ((outputs.softmax(1) - wanted) ** 2).sum(), len(outputs)


def brier(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The same of each image."""
    wanted = F.one_hot(batch["label"], outputs.shape[1])
    return ((outputs.softmax(1) - wanted) ** 2).sum(1)


def mean(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A mistake: a mean, and no number of losses."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())


def wrong_shape(outputs: Tensor, batch: dict[str, Tensor]) -> Any:
    """A mistake: shapes that do not match."""
    return F.cross_entropy(outputs, batch["targets"]), 1


def detached(outputs: Tensor, batch: dict[str, Tensor]) -> Any:
    """A mistake: no gradient."""
    loss, count = smoothed(outputs.detach(), batch)
    return loss, count


def of_batch(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    """A mistake: a mean over the batch, not a value a sample."""
    return torch.zeros(())


# Callbacks ----------------------------------------------------------------------------------------


def recorded(kind: str, values: dict[str, Any]) -> None:
    """Write each call into a file; spoil what it got."""
    with Path(os.environ["CALLS"]).open("a") as file:
        file.write(json.dumps([kind, values]) + "\n")
    values.clear()


def fails_at_steps(kind: str, values: dict[str, Any]) -> None:
    if kind == "step":
        raise ValueError(f"no step {values['step']}, please")


def slow(kind: str, values: dict[str, Any]) -> None:  # noqa: ARG001
    time.sleep(3.0)


def one_argument(kind: str) -> None:
    raise AssertionError(kind)
