"""Losses of hidden tokens: the head computes these alone, and how often it is right is counted.

One token in seven is hidden, and the product with the vocabulary is the largest of a small model.
Which tokens are hidden stands in a micro-batch before it goes to the device, so each rank picks
its own of them, in as many rows as the fullest rank of tp needs, rounded up to whole tiles. Where
the tp axis splits a sample, ranks gather what they picked as they would gather all tokens.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes, T = ranks of
tp, N = rows that one of them picks, V = vocabulary, or this rank's part of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardyard.config.masking import TILE
from shardyard.data.micro_batch import IGNORED, MicroBatch
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.loss_computation import Part
from shardyard.tasks.token_losses import LanguageModel


class HiddenTokens(LanguageModel):
    """Forward pass and losses of the tokens that have a target."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        super().__init__(parts, mesh, device=device)
        self._own_l = None if self.tokens_l is None else self.tokens_l.cpu()
        self._vocab_size = int(parts.model.config.vocab_size)  # type: ignore[arg-type,union-attr]
        self._right = torch.zeros(())
        self.token_losses.watch = self._count

    def backward(self, batches: Sequence[MicroBatch]) -> Part:
        """Forward and backward passes of all micro-batches."""
        part = super().backward(self._picked(batches))
        return part._replace(sums=self._sums(part.divisor))

    def forward(self, batches: Iterable[MicroBatch]) -> Part:
        """Forward passes alone; counts what was hidden, too."""
        frequency_V = torch.zeros(self._vocab_size, dtype=torch.int64)
        part = super().forward(self._each_picked(batches, frequency_V))
        frequency = frequency_V.to(self._device, torch.float64)
        return part._replace(sums={**self._sums(part.divisor), "frequency": frequency})

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Share of hidden tokens that are guessed; of an evaluation that of the most frequent one
        among them, too, which always saying it would guess."""
        told = {"masked_accuracy": sums["right"] / sums["hidden"]}
        if "frequency" in sums:
            told["most_frequent_token"] = sums["frequency"].max() / sums["hidden"]
        return told

    def targets(self, batch: MicroBatch) -> Tensor:
        """What the picked tokens of all ranks of tp are (1, T x N)."""
        return batch["predicted_targets"]

    def _count(self, logits: Tensor, targets: Tensor) -> None:
        """Count the picked tokens that are guessed."""
        self._right = self._right + self.token_losses.right(logits, targets)

    def _sums(self, hidden: int | Tensor) -> dict[str, Tensor]:
        right, self._right = self._right, torch.zeros(())
        return {
            "right": self._counted(right.to(self._device, torch.float64)),
            "hidden": torch.as_tensor(hidden, dtype=torch.float64, device=self._device),
        }

    def _each_picked(
        self, batches: Iterable[MicroBatch], frequency_V: Tensor
    ) -> Iterator[MicroBatch]:
        """Micro-batches as their turn comes; adds to how often each token is hidden."""
        for batch in batches:
            if self._mesh.speaks_for_samples:
                hidden_N = batch["targets"][batch["targets"] != IGNORED]
                frequency_V += torch.bincount(hidden_N, minlength=self._vocab_size)
            yield self._picked([batch])[0]

    def _picked(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The same with what each rank picks; of equal size where a pipeline joins them."""
        if all("predicted" in batch.fields for batch in batches):  # of sizes alone
            return list(batches)
        targets = [self._targets_by_rank(batch) for batch in batches]
        most = [max(int((each != IGNORED).sum()) for each in ranks) for ranks in targets]
        if self.pipeline is not None:
            most = [max(most)] * len(most)
        return [
            batch.with_fields(**self._pick(ranks, rows=rows))
            for batch, ranks, rows in zip(batches, targets, most, strict=True)
        ]

    def _targets_by_rank(self, batch: MicroBatch) -> list[Tensor]:
        """For each rank of tp, the targets (B x l / T) of the tokens it holds."""
        targets_BL = batch["targets"]
        targets_Bl = targets_BL if self._own_l is None else targets_BL[:, self._own_l]
        return [part.flatten() for part in targets_Bl.chunk(self._mesh.layout.tp, dim=1)]

    def _pick(self, targets: Sequence[Tensor], *, rows: int) -> dict[str, Tensor]:
        size = min(TILE * max(1, -(-rows // TILE)), len(targets[0]))
        places_TN = torch.zeros(len(targets), size, dtype=torch.int64)
        targets_TN = torch.full_like(places_TN, IGNORED)  # rows over repeat token 0, for nothing
        for rank, of_rank in enumerate(targets):
            hidden_N = (of_rank != IGNORED).nonzero()[:, 0]
            places_TN[rank, : len(hidden_N)] = hidden_N
            targets_TN[rank, : len(hidden_N)] = of_rank[hidden_N]
        return {
            "predicted": places_TN[self._mesh.tensor_rank][None],
            "predicted_targets": targets_TN.flatten()[None],
        }
