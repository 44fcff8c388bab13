"""BERT's own training: hidden tokens, and whether the second text of a sample follows the first.

The loss is the sum of two means, that over the hidden tokens of a step and that over its samples,
as in google-research/bert (run_pretraining.py). Gradients are added up undivided and divided once,
by the hidden tokens; so a sample's loss weighs as many of them as a step has for each sample. How
many that are, ranks agree on before the first pass of a step, or after the last of an evaluation.

Shape suffixes: B = samples, N = rows of hidden tokens, V = vocabulary, or this rank's part of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.premasked import HiddenRecords
from shardyard.data.samples import Prepare, SampleSet, identity_prepare
from shardyard.data.sentence_pairs import SentencePairs, pair_marks
from shardyard.data.shards import TokenShards
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.language import perplexity, vocabulary
from shardyard.tasks.loss_computation import LossSums
from shardyard.tasks.masked_lm import MaskedLM, MaskedTokens


class BertPretraining(MaskedLM):
    """Pairs of texts with hidden tokens."""

    @classmethod
    def samples(cls, resolved: Resolved, split: str) -> SampleSet:
        """Pairs of texts of a split, or records that were made elsewhere."""
        recipe, folder = resolved.recipe, Path(resolved.data.dir)
        seq_len = recipe.data.seq_len
        assert isinstance(seq_len, int)
        shards = TokenShards(folder, split, vocab_size=vocabulary(resolved))
        if DATA_FORMATS[recipe.data.format].holds_samples:
            return HiddenRecords(shards, seq_len=seq_len)
        return SentencePairs(shards, pair_marks(folder), seq_len=seq_len, seed=recipe.run.seed)

    @staticmethod
    def preparation(resolved: Resolved, split: str) -> Prepare:
        """Hides tokens, but in records, in which some are hidden already."""
        if DATA_FORMATS[resolved.recipe.data.format].holds_samples:
            return identity_prepare
        return MaskedLM.preparation(resolved, split)

    @staticmethod
    def compute(
        parts: ParallelModel,
        mesh: Mesh,
        *,
        recipe: Recipe,  # noqa: ARG004
        device: torch.device,
    ) -> "MaskedTokensWithPairs":
        """By the losses of hidden tokens and of pairs."""
        return MaskedTokensWithPairs(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples."""
        batch = MaskedLM.empty_batch(recipe)
        return batch.with_fields(
            segments=torch.zeros_like(batch["tokens"]),
            next_sentence_labels=torch.zeros_like(batch.samples_B),
        )

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """The sum of both losses, and each; perplexity is that of hidden tokens."""
        of_tokens = perplexity(means.get("masked_loss", loss))
        return {"loss": loss, "perplexity": of_tokens, **means}


class MaskedTokensWithPairs(MaskedTokens):
    """Forward pass and losses of hidden tokens, and of pairs of texts."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        super().__init__(parts, mesh, device=device)
        # the first token of a sample says it; other ranks' tokens are computed for nothing, as
        # sharded gradients want a part of every rank
        self._has_first = self._own_l is None or int(self._own_l[0]) == 0
        self._has_first &= mesh.tensor_rank == 0
        self._weight: Tensor | float = 0.0
        self._reported: dict[str, Tensor] = {}
        self._pairs = 0

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches."""
        self._weight = self._hidden_a_pair(self._divisor(batches), self._pairs_of(batches))
        return super().backward(batches)

    def forward(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run only forward passes."""
        self._weight = 0.0  # known when all were seen
        part = super().forward(batches)
        weight = self._hidden_a_pair(part.divisor, part.sums["pairs"])
        return part._replace(loss_sum=part.loss_sum + weight * part.sums["pair_loss"])

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Both losses, and the shares of hidden tokens and of pairs that are guessed."""
        return {
            "masked_loss": sums["masked_loss"] / sums["hidden"],
            "next_sentence_loss": sums["pair_loss"] / sums["pairs"],
            **super().means(sums),
            "next_sentence_accuracy": sums["pairs_right"] / sums["pairs"],
        }

    def targets(self, batch: MicroBatch) -> Tensor:
        """Return the picked tokens' targets, followed by the labels of the pairs (1, N + B)."""
        labels_1B = batch["next_sentence_labels"][None]
        return torch.cat([super().targets(batch), labels_1B], dim=1)

    def losses(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """Sum of both losses, that of pairs by its weight, fp32; counts what is guessed."""
        of_hidden, of_pairs_B2 = outputs
        rows = targets.shape[1] - len(of_pairs_B2)
        labels_B = targets[0, rows:]
        of_tokens = super().losses(of_hidden, targets[:, :rows])
        of_pairs_B2 = of_pairs_B2.float()
        of_pairs = F.cross_entropy(of_pairs_B2, labels_B, ignore_index=IGNORED, reduction="sum")
        of_pairs = of_pairs * float(self._has_first)
        right = (of_pairs_B2.argmax(dim=1) == labels_B).sum() * float(self._has_first)
        for name, each in (
            ("masked_loss", of_tokens),
            ("pair_loss", of_pairs),
            ("pairs_right", right),
        ):
            self._reported[name] = self._reported.get(name, 0.0) + each.detach().double()
        return of_tokens + self.loss_scale.on(self._weight * of_pairs)

    def _sums(self, hidden: int | Tensor) -> dict[str, Tensor]:
        told, self._reported = self._reported, {}
        pairs, self._pairs = self._pairs, 0
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        return {
            **super()._sums(hidden),
            **{
                name: self._counted(told.get(name, nothing))
                for name in ("masked_loss", "pair_loss", "pairs_right")
            },
            "pairs": torch.full_like(nothing, pairs),
        }

    def _select_predicted(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        self._pairs += self._pairs_of(batches)
        return super()._select_predicted(batches)

    def _pairs_of(self, batches: Sequence[MicroBatch]) -> int:
        """Pairs that this rank speaks for."""
        if not self._mesh.speaks_for_samples:
            return 0
        return sum(int((batch["next_sentence_labels"] != IGNORED).sum()) for batch in batches)

    def _hidden_a_pair(self, hidden: int | Tensor, pairs: int | Tensor) -> Tensor:
        """Hidden tokens of all ranks for each of their pairs, fp64; no device is waited for."""
        counts = torch.zeros(2, dtype=torch.float64, device=self._device)
        counts[0], counts[1] = hidden, pairs
        dist.all_reduce(counts)
        return counts[0] / counts[1]
