"""Scores of predicted labels: of classes, of numbers, and of entities in tagged text.

All are computed once, over a whole validation split. Shape suffixes: N = samples, C = labels.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardyard.config.rules.labels import TAG
from shardyard.tasks.confusion import count_confusion, matrix_of


def class_scores(guesses_N: Tensor, labels_N: Tensor, *, num_labels: int) -> dict[str, Tensor]:
    """Return accuracy, F1 and Matthews' correlation coefficient, fp64.

    ``f1`` is that of label 1 where there are two labels, else the mean over labels
    (``f1_macro``). A label that is neither predicted nor there has F1 0, as in scikit-learn.
    """
    counts = torch.zeros(num_labels**2, dtype=torch.float64, device=labels_N.device)
    count_confusion(counts, guesses_N, labels_N)
    confusion_CC = matrix_of(counts)
    right_C, actual_C, guessed_C = (
        confusion_CC.diagonal(), confusion_CC.sum(dim=1), confusion_CC.sum(dim=0)
    )  # fmt: skip
    seen_C = actual_C + guessed_C
    f1_C = torch.where(seen_C > 0, 2 * right_C / seen_C.clamp(min=1.0), 0.0)
    # scikit-learn averages over labels that occur in either
    macro = f1_C[seen_C > 0].mean()
    total = confusion_CC.sum()
    return {
        "accuracy": right_C.sum() / total,
        "f1": f1_C[1] if num_labels == 2 else macro,
        "f1_macro": macro,
        "matthews": _matthews(right_C.sum(), actual_C, guessed_C, total),
    }


def _matthews(right: Tensor, actual_C: Tensor, guessed_C: Tensor, total: Tensor) -> Tensor:
    """Return the coefficient for any number of labels; 0 where one is always predicted or there.

    Source: Gorodkin 2004, doi:10.1016/j.compbiolchem.2004.09.006.
    """
    covariance = right * total - (actual_C * guessed_C).sum()
    spread = (total**2 - (guessed_C**2).sum()) * (total**2 - (actual_C**2).sum())
    return torch.where(spread > 0, covariance / spread.clamp(min=1.0).sqrt(), 0.0)


def number_scores(guesses_N: Tensor, labels_N: Tensor) -> dict[str, Tensor]:
    """Return the mean squared error, and Pearson's and Spearman's correlation, fp64.

    The correlations are NaN where all guesses, or all labels, are equal.
    """
    return {
        "mse": (guesses_N - labels_N).square().mean(),
        "pearson": _pearson(guesses_N, labels_N),
        "spearman": _pearson(_ranks(guesses_N), _ranks(labels_N)),
    }


def _pearson(x_N: Tensor, y_N: Tensor) -> Tensor:
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    return (x_N * y_N).sum() / (x_N.square().sum() * y_N.square().sum()).sqrt()


def _ranks(x_N: Tensor) -> Tensor:
    """Return the rank of each number from 1 on; equal numbers share the mean of their ranks."""
    _, which_N, counts = torch.unique(x_N, return_inverse=True, return_counts=True)
    last: Tensor = counts.cumsum(0).double()
    mean: Tensor = last - (counts.double() - 1) / 2
    return mean[which_N]


# Entities in tagged text, as the CoNLL shared tasks count them (conlleval), and seqeval after them.
#
# An entity begins at B- or S-, at any tag behind O or behind the end of another, and where the
# type changes. So I-PER after O begins one, although IOB2 would write B-PER. BILOU's L- and U- are
# IOBES's E- and S-.

_OF_BILOU = {"L": "E", "U": "S"}


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield type, first and last word of each entity of a sentence."""
    before, kind, begin = "O", "", 0
    for index, tag in enumerate([*tags, "O"]):
        match = TAG.fullmatch(tag)
        prefix, kind_now = ("O", "") if match is None else (match[1], match[2])
        prefix = _OF_BILOU.get(prefix, prefix)
        if before != "O" and _ends(before, prefix, is_other=kind != kind_now):
            yield kind, begin, index - 1
        if prefix != "O" and _begins(before, prefix, is_other=kind != kind_now):
            begin = index
        before, kind = prefix, kind_now


def _ends(before: str, prefix: str, *, is_other: bool) -> bool:
    """Whether an entity ends before a tag."""
    return before in "ES" or prefix in "BSO" or is_other


def _begins(before: str, prefix: str, *, is_other: bool) -> bool:
    """Whether an entity begins at a tag."""
    return prefix in "BS" or before in "OES" or is_other


def entity_scores(right: Tensor, guessed: Tensor, actual: Tensor) -> dict[str, Tensor]:
    """Return precision, recall and F1 of entities over all types; 0 where there are none.

    Args:
        right: Entities that are guessed with the right type, first and last word.
        guessed: Entities that are guessed.
        actual: Entities that there are.
    """
    precision, recall = (right / each.clamp(min=1.0) for each in (guessed, actual))
    total = precision + recall
    f1 = torch.where(total > 0, 2 * precision * recall / total.clamp(min=1e-300), 0.0)
    return {"precision": precision, "recall": recall, "f1": f1}
