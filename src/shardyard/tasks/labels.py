"""Labels of texts or pairs of texts (classes, or a number to predict), and labels of words.

A word's label is that of its first token.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.labels.samples import LabelledSet
from shardyard.data.loader import MicroBatch
from shardyard.data.samples import Stream
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.base import Task, TaskData
from shardyard.tasks.label_losses import LabelLosses, SampleLabels, TokenLabels


class LabelTask(Task):
    """Reads rows with labels, one a sample."""

    @classmethod
    def open_data(cls, resolved: Resolved) -> TaskData:
        """Both splits: the training rows without end, the validation rows each once."""
        train = Stream(_rows(resolved, "train"), seed=resolved.recipe.run.seed)
        if not resolved.data.eval_samples:
            return TaskData(train, None)
        return TaskData(train, Stream(_rows(resolved, "eval"), seed=None))

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of a label, and the scores of what is predicted."""
        return {"loss": loss, **means}


class SequenceClassification(LabelTask):
    """One label a sample."""

    @staticmethod
    def compute(
        parts: ParallelModel,
        mesh: Mesh,
        *,
        recipe: Recipe,  # noqa: ARG004
        device: torch.device,
    ) -> LabelLosses:
        """By the labels of samples."""
        return SampleLabels(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples, whose first tokens the head reads."""
        batch = _empty_rows(recipe)
        label_B = torch.zeros_like(batch.samples_B)
        return batch.with_fields(label=label_B, reads=label_B.clone())


class TokenClassification(LabelTask):
    """A label for each word."""

    @staticmethod
    def compute(
        parts: ParallelModel,
        mesh: Mesh,
        *,
        recipe: Recipe,  # noqa: ARG004
        device: torch.device,
    ) -> LabelLosses:
        """By the labels of tokens."""
        return TokenLabels(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples, each token of which has a label."""
        batch = _empty_rows(recipe)
        return batch.with_fields(targets=torch.zeros_like(batch["tokens"]))


def _empty_rows(recipe: Recipe) -> MicroBatch:
    """Rows of ``data.seq_len`` tokens without labels, for a run on fake devices."""
    samples, seq_len = int(recipe.optim.micro_batch), int(recipe.data.seq_len)
    tokens, positions, segments = torch.zeros(3, samples, seq_len, dtype=torch.int64).unbind()
    starts = torch.zeros(samples, 1, dtype=torch.int32)
    return MicroBatch(
        fields={"tokens": tokens, "positions": positions, "segments": segments, "starts": starts},
        samples_B=torch.zeros(samples, dtype=torch.int64),
        work=samples * seq_len,
    )


def _rows(resolved: Resolved, split: str) -> LabelledSet:
    shape = resolved.shape
    assert shape is not None, "checked: no module of the user's own"
    return LabelledSet(
        Path(resolved.data.dir),
        split,
        seq_len=int(resolved.recipe.data.seq_len),
        vocab_size=shape.vocab_size,
        reads_last=not shape.family.pools,
    )
