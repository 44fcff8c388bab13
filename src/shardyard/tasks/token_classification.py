"""Labels of words, such as those of named entities; a word's label is that of its first token."""

import torch

from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import MicroBatch
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.label_losses import LabelLosses, TokenLabels
from shardyard.tasks.sequence_classification import LabelTask, empty_rows


class TokenClassification(LabelTask):
    """A label for each word."""

    @staticmethod
    def compute(parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> LabelLosses:
        """By the labels of tokens."""
        return TokenLabels(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples, each token of which has a label."""
        batch = empty_rows(recipe)
        return batch.with_fields(targets=torch.zeros_like(batch["tokens"]))
