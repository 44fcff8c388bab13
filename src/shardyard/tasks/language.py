"""Language models of known families: from a micro-batch of text to the sum of its token losses.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes,
V = vocabulary, or this rank's part of it.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from shardyard.config.resolved import Resolved
from shardyard.config.schema import Recipe
from shardyard.config.task_names import task_row
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.samples import EvalSource, Prepare, TrainSource, unchanged
from shardyard.data.shards import TokenShards
from shardyard.parallel.data import GradientSync, backward_all, reshard
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.base import Computation, Data, Part, Task


class LanguageModel(Computation[MicroBatch]):
    """Forward pass and token losses of a whole model, or of this rank's stages of it."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        self.model = parts.model
        self.pipeline = parts.pipeline
        self.roots = parts.roots
        self.held_twice = parts.held_twice
        self.statistics = parts.statistics
        self.token_losses = parts.token_losses
        self.tokens_l = parts.tokens_l
        self._mesh = mesh
        self._device = device
        self._sync = None if self.pipeline else GradientSync(self.model, mesh.layout)

    def backward(self, batches: Sequence[MicroBatch]) -> Part:
        """Forward and backward passes of all micro-batches, through a pipeline if there is one."""
        divisor = self._divisor(batches)  # still in host memory
        if self.pipeline is not None:
            on_device = [batch.to(self._device) for batch in batches]
            total = self.pipeline.accumulate(
                [self.inputs(batch) for batch in on_device],
                [self.targets(batch) for batch in on_device],
                self.token_losses,
            )
        else:
            assert self._sync is not None
            losses = (self.loss_sum(batch.to(self._device)) for batch in batches)
            total = backward_all(losses, self._sync, number=len(batches))
        return Part(self._counted(total), divisor)

    def forward(self, batches: Iterable[MicroBatch]) -> Part:
        """Forward passes alone."""
        total, divisor = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for batch in batches:
            divisor += self._divisor([batch])
            total += self.loss_sum(batch.to(self._device))
        reshard(self.roots)
        return Part(self._counted(total), divisor)

    def inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of the model: token ids (B, l), and of whole samples positions and keys."""
        return self._mine(batch["tokens"]), batch["positions"], batch.samples_B

    def targets(self, batch: MicroBatch) -> Tensor:
        """What the tokens of this rank predict (B, l)."""
        return self._mine(batch["targets"])

    def output(self, batch: MicroBatch) -> Tensor | None:
        """Logits (B, l, V) of a forward pass; None on ranks without the end of the model."""
        through = self.model if self.pipeline is None else self.pipeline.output
        logits_BlV: Tensor | None = through(*self.inputs(batch))
        return logits_BlV

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum of cross-entropies in nats over the predicted tokens of this rank, fp32.

        0 on ranks without the end of the model.
        """
        logits_BlV = self.output(batch)
        if logits_BlV is None:
            return torch.zeros((), device=batch.samples_B.device)
        return self.token_losses(logits_BlV, self.targets(batch))

    def _mine(self, x_BL: Tensor) -> Tensor:
        return x_BL if self.tokens_l is None else x_BL[:, self.tokens_l]

    def _counted(self, loss_sum: Tensor) -> Tensor:
        # the other ranks of tp have computed the same loss
        return loss_sum if self._mesh.tensor_rank == 0 else torch.zeros_like(loss_sum)

    def _divisor(self, batches: Sequence[MicroBatch]) -> int:
        """Tokens that are predicted; asked of what lies on a device, it waits for the device."""
        if not self._mesh.speaks_for_samples:
            return 0
        return sum(int((batch["targets"] != IGNORED).sum()) for batch in batches)


class LanguageTask(Task):
    """Reads text as samples of tokens, and is judged by the mean loss of a token."""

    columns: ClassVar[tuple[str, ...]] = ()
    """What it reads beside the tokens, by the names that an encoder of ``data.format`` gives."""

    @staticmethod
    def preparation(resolved: Resolved, split: str) -> Prepare:  # noqa: ARG004
        """What the task makes of a micro-batch of text, where it is read."""
        return unchanged

    @classmethod
    def open_data(cls, resolved: Resolved) -> Data:
        """Both splits as samples of ``data.seq_len`` tokens."""
        recipe, folder = resolved.recipe, Path(resolved.data.dir)
        seq_len = recipe.data.seq_len
        assert isinstance(seq_len, int)
        across = recipe.data.attend_across_documents
        train = TrainSource(
            TokenShards(folder, "train"),
            seq_len=seq_len,
            seed=recipe.run.seed,
            vocab_size=vocabulary(resolved),
            attend_across_documents=across,
            prepare=cls.preparation(resolved, "train"),
            columns=cls.columns,
        )
        if not resolved.data.num_samples("eval", seq_len):
            return Data(train, None)
        held_out = EvalSource(
            TokenShards(folder, "eval"),
            seq_len=seq_len,
            vocab_size=vocabulary(resolved),
            attend_across_documents=across,
            prepare=cls.preparation(resolved, "eval"),
            columns=cls.columns,
        )
        return Data(train, held_out)

    @staticmethod
    def compute(parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> LanguageModel:
        """By token losses."""
        return LanguageModel(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples."""
        samples, seq_len = int(recipe.optim.micro_batch), int(recipe.data.seq_len)
        tokens, targets, positions = torch.zeros(3, samples, seq_len, dtype=torch.int64).unbind()
        return MicroBatch(
            fields={"tokens": tokens, "targets": targets, "positions": positions},
            samples_B=torch.zeros(samples, dtype=torch.int64),
            work=samples * seq_len,
        )

    @staticmethod
    def scores(loss: float) -> dict[str, float]:
        """Loss in nats a token; exp(loss) is infinite where that is too large."""
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def vocabulary(resolved: Resolved) -> int:
    """Token ids that the model has to know."""
    if resolved.shape is not None:
        return resolved.shape.vocab_size
    # of the user's own module; a tokenizer that we train has no mask token
    mask_rows = 0 if task_row(resolved.recipe.task.name).is_causal else 1
    return resolved.data.vocab_size + mask_rows
