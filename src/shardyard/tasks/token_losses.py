"""Language models of known families: from a micro-batch of text to the sum of its token losses.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes,
V = vocabulary, or this rank's part of it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.models.attention import document_starts, most_documents
from shardyard.models.inputs import Inputs
from shardyard.parallel.fsdp import GradientSync, backward_all, reshard, summable
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.parallel.step_counters import Watcher
from shardyard.tasks.loss_computation import Computation, LossSums


class LanguageModel(Computation[MicroBatch]):
    """Forward pass and token losses of a whole model, or of this rank's stages of it."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        self.model = parts.model
        self.pipeline = parts.pipeline
        self.roots = parts.roots
        self.tied_across_stages = parts.tied_across_stages
        self.statistics = parts.statistics
        self.token_losses = parts.token_losses
        self.loss_scale = parts.token_losses.scale
        self._loss_in_model = parts.loss_in_model
        self._accepts_document_starts = parts.accepts_document_starts
        self._router_weight = parts.router_weight
        self.tokens_l = parts.tokens_l
        self._mesh = mesh
        self._device = device
        self._sync = None if self.pipeline else GradientSync(self.model, mesh)

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches, through a pipeline if there is one."""
        divisor = self._divisor(batches)  # still in host memory
        if self._router_weight is not None:
            tokens = sum(batch.work for batch in batches) if self._mesh.speaks_for_samples else 0
            self._router_weight.begin_step(divisor, tokens, device=self._device)
        if self.pipeline is not None:
            on_device = [self._placed(batch, self._max_documents(batches)) for batch in batches]
            total = self.pipeline.accumulate(
                [self.inputs(batch) for batch in on_device],
                [self.targets(batch) for batch in on_device],
                self.losses,
                loss_in_model=self._loss_in_model,
            )
        else:
            assert self._sync is not None
            losses = (self.loss_sum(self._placed(batch)) for batch in batches)
            total = backward_all(losses, self._sync, number=len(batches))
        return LossSums(self._counted(total), divisor)

    def forward(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run only forward passes."""
        total, divisor = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for batch in batches:
            divisor += self._divisor([batch])
            total += summable(self.loss_sum(self._placed(batch)))
        reshard(self.roots)
        return LossSums(self._counted(total), divisor)

    def watch(self, watcher: Watcher) -> None:
        """Follow its backward passes; those of a pipeline cannot be followed."""
        assert self._sync is not None
        self._sync.watcher = watcher

    def inputs(self, batch: MicroBatch) -> Inputs:
        """Arguments of the model; token ids are those of this rank."""
        return Inputs(
            self._local_tokens(batch["tokens"]),
            batch["positions"],
            batch.samples_B,
            batch.fields.get("segments"),
            batch.fields.get("predicted"),
            starts_BS=batch["starts"] if self._accepts_document_starts else None,
            lengths_B=batch.lengths_B,
        )

    def targets(self, batch: MicroBatch) -> Tensor:
        """Return the targets of this rank's tokens (B, l)."""
        return self._local_tokens(batch["targets"])

    def output(self, batch: MicroBatch) -> Tensor | None:
        """Logits (B, l, V) of a forward pass; None on ranks without the end of the model."""
        logits_BlV: Tensor | None = self._through(self.inputs(self._placed(batch)))
        return logits_BlV

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum of cross-entropies in nats over the predicted tokens of this rank, fp32.

        0 on ranks without the end of the model.
        """
        inputs, targets = self.inputs(batch), self.targets(batch)
        if self._loss_in_model:
            inputs = inputs._replace(targets=targets)
        found = self._through(inputs)
        if found is None:
            return torch.zeros((), device=batch.samples_B.device)
        return self.losses(found, targets)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum of the losses of what the model returns against targets, fp32."""
        loss_sum: Tensor = outputs if self._loss_in_model else self.token_losses(outputs, targets)
        return loss_sum

    def _max_documents(self, batches: Sequence[MicroBatch]) -> int | None:
        """For documents of a sample, alike in micro-batches that a pipeline joins."""
        if not self._accepts_document_starts or any("starts" in batch.fields for batch in batches):
            return None
        return max(most_documents(batch["positions"]) for batch in batches)

    def _placed(self, batch: MicroBatch, max_documents: int | None = None) -> MicroBatch:
        """On the device; where the model asks for it, with where documents begin."""
        if (
            self._accepts_document_starts and "starts" not in batch.fields
        ):  # else it is of sizes alone
            batch = batch.with_fields(
                starts=document_starts(batch["positions"].cpu(), max_documents)
            )
        return batch.to(self._device)

    def _through(self, inputs: Inputs) -> Any:
        """Return the output of the model's end on ranks that have it; else None."""
        through = self.model if self.pipeline is None else self.pipeline.output
        return through(*inputs)

    def _local_tokens(self, x_BL: Tensor) -> Tensor:
        return x_BL if self.tokens_l is None else x_BL[:, self.tokens_l]

    def _counted(self, loss_sum: Tensor) -> Tensor:
        # the other ranks of tp have computed the same loss
        return loss_sum if self._mesh.tensor_rank == 0 else torch.zeros_like(loss_sum)

    def _divisor(self, batches: Sequence[MicroBatch]) -> int:
        """Tokens that are predicted; asked of what lies on a device, it waits for the device."""
        if not self._mesh.speaks_for_samples:
            return 0
        return sum(int((batch["targets"] != IGNORED).sum()) for batch in batches)
