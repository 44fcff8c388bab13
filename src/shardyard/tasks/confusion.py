"""Confusion counts of a validation split: how often each class was predicted as each other.

Shape suffixes: N = predictions, C = classes.
"""

import torch
from torch import Tensor

from shardyard.rundir.confusion import Confusion

CONFUSION = "confusion"
"""Name of the counts (C * C,) among the sums of an evaluation."""
MOST_CLASSES = 1024
"""Most classes that are counted: the counts of so many are 8 MiB, summed over all ranks."""
SHOWN_CLASSES = 16
"""Most classes of a matrix; of more, those that are in most confusions."""
SHOWN_PAIRS = 50
"""Most pairs of classes in a list of the most frequent confusions."""


def no_confusion(num_classes: int, device: torch.device) -> dict[str, Tensor]:
    """Return counts of nothing yet, by their name; empty if there are too many classes."""
    if not 2 <= num_classes <= MOST_CLASSES:
        return {}
    return {CONFUSION: torch.zeros(num_classes**2, dtype=torch.float64, device=device)}


def count_confusion(counts: Tensor, guesses_N: Tensor, labels_N: Tensor) -> None:
    """Add predictions to the counts, in place. A label that is no class counts nowhere."""
    num_classes = round(len(counts) ** 0.5)
    is_class_N = (labels_N >= 0) & (labels_N < num_classes)
    cells_N = labels_N[is_class_N].long() * num_classes + guesses_N[is_class_N].long()
    counts.index_add_(0, cells_N, torch.ones_like(cells_N, dtype=counts.dtype))


def matrix_of(counts: Tensor) -> Tensor:
    """Return counts (C, C): row of the true class, column of the predicted one."""
    num_classes = round(len(counts) ** 0.5)
    return counts.view(num_classes, num_classes)


def summarize_confusion(counts: Tensor, names: list[str], *, step: int) -> Confusion:
    """Return what a file of a run shows of the counts: a bounded part of them.

    Args:
        names: Names of the classes by number.
        step: Step of the evaluation.
    """
    counts_CC = matrix_of(counts).round().long().cpu()
    wrong_CC = counts_CC.clone().fill_diagonal_(0)
    in_confusions_C = wrong_CC.sum(0) + wrong_CC.sum(1)
    # stable: of classes that are in equally many, the first
    shown = in_confusions_C.argsort(descending=True, stable=True)[:SHOWN_CLASSES].sort().values
    cells = wrong_CC.flatten().argsort(descending=True, stable=True)[:SHOWN_PAIRS].tolist()
    pairs = [
        (names[cell // len(names)], names[cell % len(names)], int(count))
        for cell in cells
        if (count := wrong_CC.flatten()[cell]) > 0
    ]
    return Confusion(
        step=step,
        classes=len(names),
        predictions=int(counts_CC.sum()),
        right=int(counts_CC.diagonal().sum()),
        names=[names[number] for number in shown.tolist()],
        matrix=counts_CC[shown][:, shown].tolist(),
        pairs=pairs,
    )
