"""Language models of known families: from a micro-batch of text to the sum of its token losses.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes,
V = vocabulary, or this rank's part of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.models.attention import document_starts, most_documents
from shardyard.models.forward import Inputs
from shardyard.parallel.collectives import gather_vocabulary
from shardyard.parallel.fsdp import GradientSync, backward_all, reshard, summable
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.parallel.step_counters import Watcher
from shardyard.tasks.loss_computation import Computation, LossSums
from shardyard.tasks.own_objective import NO_OBJECTIVE

PREDICTED = "predicted"
"""Name of the number of targets among the sums of a loss of the user's own."""
_OURS = ("starts", "predicted", "predicted_targets")
"""Fields of a micro-batch that only the model reads."""


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
        self._call = parts.call
        self._before_batch = parts.before_batch
        self.tokens_l = parts.tokens_l
        self._mesh = mesh
        self._device = device
        self._sync = None if self.pipeline else GradientSync(self.model, mesh)

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches, through a pipeline if there is one."""
        if self.objective.loss is not None:
            return self._backward_by_own_loss(batches)
        divisor = self._divisor(batches)  # still in host memory
        self._begin_routers(batches, divisor)
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
        if self.objective is not NO_OBJECTIVE:
            return self._forward_by_own(batches)
        total, divisor = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for batch in batches:
            divisor += self._divisor([batch])
            total += summable(self.loss_sum(self._placed(batch)))
        reshard(self.roots)
        return LossSums(self._counted(total), divisor)

    def _backward_by_own_loss(self, batches: Sequence[MicroBatch]) -> LossSums:
        assert self._sync is not None, "checked: no pipeline"
        counts: list[Tensor] = []
        predicted = self._divisor(batches)
        self._begin_routers(batches, predicted)  # their losses weigh nothing, as is checked

        def losses() -> Iterator[Tensor]:
            for batch in batches:
                logits, outputs, fields = self._outputs_of(batch)
                self._watch_logits(logits, batch)
                loss, count = self._own_loss(batch, outputs, fields)
                counts.append(count)
                yield self.loss_scale.on(loss)

        total = backward_all(losses(), self._sync, number=len(batches))
        sums = {PREDICTED: self._on_device(predicted)}
        return LossSums(self._counted(total), self._counted(torch.stack(counts).sum()), sums)

    def _forward_by_own(self, batches: Iterable[MicroBatch]) -> LossSums:
        total = divisor = predicted = self._on_device(0)
        sums = self.objective.zeros(self._device)
        for batch in batches:
            logits, outputs, fields = self._outputs_of(batch)
            predicted = predicted + self._divisor([batch])
            if self.objective.loss is None:
                loss = self.token_losses(logits, self.targets(self._placed(batch)))
                divisor = predicted
            else:
                self._watch_logits(logits, batch)
                loss, count = self._own_loss(batch, outputs, fields)
                divisor = divisor + self._counted(count)
            total = total + summable(loss)
            if not batch.is_padding:
                for name, found in self.objective.metric_sums(outputs, fields).items():
                    sums[name] = sums[name] + self._counted(found)
        reshard(self.roots)
        return LossSums(self._counted(total), divisor, {**sums, PREDICTED: predicted})

    def _begin_routers(self, batches: Sequence[MicroBatch], divisor: int) -> None:
        if self._router_weight is not None:
            tokens = sum(batch.work for batch in batches) if self._mesh.speaks_for_samples else 0
            self._router_weight.begin_step(divisor, tokens, device=self._device)

    def _outputs_of(self, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits of this rank, and what functions of the user's own get: outputs and fields.

        Outputs are fp32 logits (B, L, V) without rows of padding; of hidden tokens only (1, N, V).
        """
        rows = max(1, int((batch.samples_B >= 0).sum()))  # still in host memory
        placed = self._placed(batch)
        logits: Tensor = self._through(self.inputs(placed))
        size = int(self.model.config.vocab_size)  # type: ignore[arg-type,union-attr]
        outputs = gather_vocabulary(logits, self.token_losses.group, size=size).float()
        fields = {name: each for name, each in placed.fields.items() if name not in _OURS}
        targets = self.targets(placed)
        if len(outputs) == len(batch.samples_B):
            outputs, targets = outputs[:rows], targets[:rows]
        fields = {name: each[:rows] for name, each in fields.items()}
        return logits, outputs, {**fields, "targets": targets}

    def _own_loss(
        self, batch: MicroBatch, outputs: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        loss, count = self.objective.loss_sum(outputs, fields)
        if batch.is_padding:  # it is there so that ranks meet
            return 0.0 * loss, 0.0 * count
        return loss, count

    def _watch_logits(self, logits: Tensor, batch: MicroBatch) -> None:
        if self.token_losses.watch is not None:
            self.token_losses.watch(logits.detach(), self.targets(self._placed(batch)))

    def _on_device(self, number: int) -> Tensor:
        return torch.tensor(float(number), dtype=torch.float64, device=self._device)

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
        if self._before_batch is not None:
            self._before_batch(batch)
        if (
            self._accepts_document_starts and "starts" not in batch.fields
        ):  # else it is of sizes alone
            batch = batch.with_fields(
                starts=document_starts(batch["positions"].cpu(), max_documents)
            )
        return batch.to(self._device)

    def _through(self, inputs: Inputs) -> Any:
        """Return the output of the model's end on ranks that have it; else None."""
        if self._call is not None:
            return self._call(self.model, inputs)
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
