"""Samples of text in words, with the parts that are trained on."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shardyard.data.loader import IGNORED, Samples
from shardyard.errors import RequestError


def show_samples(samples: Samples, folder: Path, *, count: int) -> list[dict[str, Any]]:
    """Describe the first samples that training reads.

    Args:
        folder: Prepared dataset, with its tokenizer.
        count: Number of samples; fewer if the split has fewer.

    Returns:
        For each sample its numbers of ``tokens`` and ``loss_tokens``, and its ``parts`` in order:
        ``text``, and whether it has ``loss``. Tokens that a task hides are shown as it hides them.

    Raises:
        RequestError: The samples are not running text.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shown = []
    for position in range(min(count, samples.num_samples)):
        batch = samples.micro_batch(range(position, position + 1), 1)
        if {"tokens", "targets"} - batch.fields.keys():
            raise RequestError("--show is for text, and these samples are not: leave it out.")
        length = batch["tokens"].shape[1] if batch.lengths_B is None else int(batch.lengths_B[0])
        tokens, targets, positions = (
            batch[name][0, :length].tolist() for name in ("tokens", "targets", "positions")
        )
        parts: list[dict[str, Any]] = []
        for document in _documents(positions):
            parts += _parts(tokens[document], targets[document], tokenizer)
        loss_tokens = sum(target != IGNORED for target in targets)
        shown.append({"tokens": length, "loss_tokens": loss_tokens, "parts": parts})
    return shown


def _documents(positions: list[int]) -> Iterator[slice]:
    """The places of each document, where positions restart."""
    starts = [place for place, position in enumerate(positions) if position == 0 or place == 0]
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        yield slice(start, stop)


def _parts(
    tokens: list[int], targets: list[int], tokenizer: Tokenizer
) -> Iterator[dict[str, object]]:
    """Text with and without loss in turn: the target at a token is the one that follows it."""
    ends_with_target = targets[-1] != IGNORED
    ids = [*tokens, targets[-1]] if ends_with_target else tokens
    has_loss = [False, *(target != IGNORED for target in targets)]
    marked = zip(has_loss[: len(ids)], ids, strict=True)
    for loss, group in groupby(marked, key=lambda each: each[0]):
        part = [token for _, token in group]
        yield {"loss": loss, "text": tokenizer.decode(part, skip_special_tokens=False)}
