"""Heads over labels: from a micro-batch of rows to the sum of their losses, and what is guessed.

Each rank computes the logits of the tokens whose residual stream it holds, so losses and counts are
sums over all ranks of a sample. Shape suffixes: B = samples, L = tokens of a sample, l = those that
this rank holds, N = samples of a split, C = labels.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardyard.config.rules.labels import is_tagged
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.parallel.fsdp import reshard, summable
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.confusion import CONFUSION, count_confusion, no_confusion
from shardyard.tasks.label_metrics import (
    class_scores,
    entities,
    entity_scores,
    number_scores,
)
from shardyard.tasks.loss_computation import LossSums
from shardyard.tasks.token_losses import LanguageModel


class LabelLosses(LanguageModel):
    """Forward pass and losses of a model with a head over labels."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        super().__init__(parts, mesh, device=device)
        config: Any = parts.model.config
        self._num_labels = int(config.num_labels)
        self._local_l = None if parts.local_l is None else parts.local_l.cpu()

    @abstractmethod
    def located(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with its targets on this rank, made in host memory."""

    @abstractmethod
    def counted(self, batches: Iterable[tuple[MicroBatch, Any, Tensor]]) -> dict[str, Tensor]:
        """Return the sums of an evaluation, from batches with outputs and targets.

        Outputs are None on ranks without the end of the model. All ranks call it together.
        """

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches."""
        return super().backward([self.located(batch) for batch in batches])

    def forward(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run only forward passes, and count what is guessed."""
        total, divisor = torch.zeros((), dtype=torch.float64, device=self._device), 0

        def outputs() -> Iterator[tuple[MicroBatch, Any, Tensor]]:
            nonlocal total, divisor
            for batch in map(self.located, batches):
                divisor += self._divisor([batch])
                placed = self._placed(batch)
                found, targets = self._through(self.inputs(placed)), self.targets(placed)
                if found is not None:
                    total = total + summable(self.losses(found, targets))
                yield placed, found, targets

        sums = self.counted(outputs())
        reshard(self.roots)
        return LossSums(total, divisor, sums)

    def targets(self, batch: MicroBatch) -> Tensor:
        """Return the targets of the tokens that this rank holds."""
        return batch["own_targets"]

    def _counted(self, loss_sum: Tensor) -> Tensor:
        return loss_sum  # each rank of tp has the losses of its own tokens


class SampleLabels(LabelLosses):
    """Forward pass and losses of one label a sample: a class, or a number if there is one label."""

    @property
    def _is_regression(self) -> bool:
        return self._num_labels == 1

    def located(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the place of the token of each sample that the head reads.

        A sample whose token another rank holds has no target here, and neither has padding.
        """
        if "own_targets" in batch.fields:  # of sizes alone
            return batch
        reads_B, label_B = batch["reads"], batch["label"]
        columns_B, width = reads_B, batch["tokens"].shape[1]
        is_here_B = batch.samples_B >= 0
        if self._local_l is not None:
            width = len(self._local_l)
            hits_Bl = reads_B[:, None] == self._local_l
            is_here_B, columns_B = is_here_B & hits_Bl.any(dim=1), hits_Bl.int().argmax(dim=1)
        predicted_1B = (torch.arange(len(reads_B)) * width + columns_B)[None]
        if self._is_regression:
            targets = torch.cat([label_B.float() * is_here_B, is_here_B.float()])[None]
        else:
            targets = torch.where(is_here_B, label_B, IGNORED)[None]
        return batch.with_fields(predicted=predicted_1B, own_targets=targets)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum of cross-entropies in nats, or of squared errors, fp32."""
        logits_BC = outputs[0].float()
        if self._is_regression:
            label_B, weight_B = targets[0].chunk(2)
            # a pipeline fills up with batches whose targets are all IGNORED
            weight_B = weight_B.clamp(min=0.0)
            return self.loss_scale.on(((logits_BC[:, 0] - label_B).square() * weight_B).sum())
        loss = F.cross_entropy(logits_BC, targets[0], ignore_index=IGNORED, reduction="sum")
        return self.loss_scale.on(loss)

    def counted(self, batches: Iterable[tuple[MicroBatch, Any, Tensor]]) -> dict[str, Tensor]:
        """Return the guess and the label of every sample of the split, each by its number."""
        found = [
            (batch.samples_B, *self._guesses(outputs, targets, batch.samples_B))
            for batch, outputs, targets in batches
        ]
        samples, guesses, labels, is_here = (torch.cat(each) for each in zip(*found, strict=True))
        number = samples.max() + 1
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        sums = {}
        for name, values in (("guesses", guesses), ("labels", labels)):
            sums[name] = torch.zeros(int(number), dtype=torch.float64, device=self._device)
            sums[name][samples[is_here]] = values[is_here]
        return sums

    def _guesses(
        self, outputs: Any, targets: Tensor, samples_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return guess and label of each sample, fp64, and whether this rank has them."""
        if outputs is None:
            nothing_B = torch.zeros_like(samples_B, dtype=torch.float64)
            return nothing_B, nothing_B, torch.zeros_like(samples_B, dtype=torch.bool)
        logits_BC = outputs[0].float()
        if self._is_regression:
            label_B, weight_B = targets[0].chunk(2)
            return logits_BC[:, 0].double(), label_B.double(), weight_B > 0
        return logits_BC.argmax(dim=1).double(), targets[0].double(), targets[0] != IGNORED

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of an evaluation."""
        if "guesses" not in sums:
            return {}
        guesses_N, labels_N = sums["guesses"], sums["labels"]
        if self._is_regression:
            return number_scores(guesses_N, labels_N)
        return class_scores(guesses_N, labels_N, num_labels=self._num_labels)

    def confusion(self, sums: Mapping[str, Tensor]) -> Tensor | None:
        """Return how often each label was predicted as each other; None for numbers."""
        found = {} if self._is_regression else no_confusion(self._num_labels, self._device)
        if CONFUSION not in found or "guesses" not in sums:
            return None
        count_confusion(found[CONFUSION], sums["guesses"], sums["labels"])
        return found[CONFUSION]

    def _divisor(self, batches: Sequence[MicroBatch]) -> int:
        """Samples that have a label."""
        if not self._mesh.speaks_for_samples:
            return 0
        return sum(int((batch.samples_B >= 0).sum()) for batch in batches)


class TokenLabels(LabelLosses):
    """Forward pass and losses of labels of tokens; of words, those of their first tokens."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        super().__init__(parts, mesh, device=device)
        config: Any = parts.model.config
        self._names = [str(config.id2label[number]) for number in range(self._num_labels)]

    def located(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the targets (B, l) of the tokens that this rank holds."""
        if "own_targets" in batch.fields:
            return batch
        targets_BL = batch["targets"]
        own = targets_BL if self._local_l is None else targets_BL[:, self._local_l]
        return batch.with_fields(own_targets=own.contiguous())

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum of cross-entropies in nats, fp32."""
        logits_NC = outputs.float().flatten(0, 1)
        loss = F.cross_entropy(logits_NC, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return self.loss_scale.on(loss)

    def counted(self, batches: Iterable[tuple[MicroBatch, Any, Tensor]]) -> dict[str, Tensor]:
        """Count tokens and entities: those that are guessed, that there are, and the right ones."""
        counts = dict.fromkeys(_COUNTED, 0)
        confusion = no_confusion(self._num_labels, self._device)
        for batch, outputs, _ in batches:
            guesses_BL = self._guesses(outputs, batch["targets"])
            if not self._speaks_for_outputs(outputs):
                continue
            for each in confusion.values():
                count_confusion(each, guesses_BL.flatten(), batch["targets"].flatten())
            labels_BL = batch["targets"].cpu()
            for guesses_L, labels_L in zip(guesses_BL.cpu(), labels_BL, strict=True):
                has_label_L = labels_L != IGNORED
                if has_label_L.any():
                    self._count(counts, guesses_L[has_label_L], labels_L[has_label_L])
        return {
            name: torch.tensor(float(number), dtype=torch.float64, device=self._device)
            for name, number in counts.items()
        } | confusion

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an evaluation's share of right tokens; of tags also scores of entities."""
        if "tokens" not in sums:
            return {}
        scores = {"accuracy": sums["tokens_right"] / sums["tokens"]}
        if not is_tagged(self._names):
            return scores
        return scores | entity_scores(
            sums["entities_right"], sums["entities_guessed"], sums["entities"]
        )

    def _guesses(self, outputs: Any, targets_BL: Tensor) -> Tensor:
        """Return the guessed label of every token (B, L), of all ranks that share the samples."""
        guesses_BL = torch.zeros_like(targets_BL)
        if outputs is not None:
            own_Bl = outputs.argmax(dim=-1)
            if self._local_l is None:
                guesses_BL = own_Bl
            else:
                guesses_BL[:, self._local_l.to(own_Bl.device)] = own_Bl
        for axis in ("tp", "cp"):
            if getattr(self._mesh.layout, axis) > 1:
                dist.all_reduce(guesses_BL, group=self._mesh.group(axis))
        return guesses_BL

    def _speaks_for_outputs(self, outputs: Any) -> bool:
        """Whether this is the one rank of those with these outputs that counts them."""
        return outputs is not None and self._mesh.tensor_rank == self._mesh.context_rank == 0

    def _count(self, counts: dict[str, int], guesses: Tensor, labels: Tensor) -> None:
        """Add the tokens and entities of a sample."""
        counts["tokens"] += len(labels)
        counts["tokens_right"] += int((guesses == labels).sum())
        guessed, actual = (
            set(entities([self._names[number] for number in each.tolist()]))
            for each in (guesses, labels)
        )
        counts["entities"] += len(actual)
        counts["entities_guessed"] += len(guessed)
        counts["entities_right"] += len(guessed & actual)


_COUNTED = ("tokens", "tokens_right", "entities", "entities_guessed", "entities_right")
