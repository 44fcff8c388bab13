"""Labels of texts or pairs of texts (classes, or a number to predict), and labels of words.

A word's label is that of its first token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.labels.samples import LabelledSet
from shardyard.data.loader import MicroBatch
from shardyard.data.samples import Stream
from shardyard.models.build import fields_of_labels
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.base import Task, TaskData
from shardyard.tasks.label_losses import LabelLosses, SampleLabels, TokenLabels
from shardyard.tasks.language import vocabulary


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
    shape = resolved.shape  # None: a model of no family finds the token to read by itself
    return LabelledSet(
        Path(resolved.data.dir),
        split,
        seq_len=int(resolved.recipe.data.seq_len),
        vocab_size=vocabulary(resolved),
        reads_last=shape is not None and not shape.family.pools,
    )


def label_fields_of(resolved: Resolved) -> dict[str, Any]:
    """Fields of config.json for the labels of a run's data; empty if it has none."""
    data, labelled = resolved.data, task_row(resolved.recipe.task.name).labelled
    if labelled is None or data.num_labels is None:
        return {}
    return fields_of_labels(data.num_labels, data.label_names, per_sample=labelled == "samples")
