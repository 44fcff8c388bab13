"""Predict hidden tokens from both sides: which tokens of a sample are hidden, and behind what.

Of the tokens 15 % are chosen; of those 80 % become the mask token, 10 % another token at random and
10 % stay, and the model is to say what they were (Devlin et al. 2019, arXiv:1810.04805, section
3.1). The choice is a function of (seed, sample, place in the sample): the same in every layout, new
in every epoch. A sample in which none falls under the 15 % hides the token that came nearest, as
BERT's own code (google-research/bert, create_pretraining_data.py) hides at least one: without any,
a step or an evaluation would have no mean. Shape suffixes: B = samples, L = tokens of a sample.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from shardyard.config.data_choices import MASKED_SHARE, TILE, predicted_rows
from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.samples import Prepare
from shardyard.errors import RequestError
from shardyard.models.random import keep_mask, key_of, random_bits
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.language import LanguageTask, vocabulary
from shardyard.tasks.loss_computation import LossSums
from shardyard.tasks.token_losses import PREDICTED, LanguageModel

# Losses of hidden tokens: the head computes these alone, and how often it is right is counted.
#
# One token in seven is hidden, and the product with the vocabulary is the largest of a small model.
# Which tokens are hidden stands in a micro-batch before it goes to the device, so each rank picks
# its own of them, in as many rows as the fullest rank of tp needs, rounded up to whole tiles. Where
# the tp axis splits a sample, ranks gather what they picked as they would gather all tokens.
#
# Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes, T = ranks
# of tp, N = rows that one of them picks, V = vocabulary, or this rank's part of it.


class MaskedTokens(LanguageModel):
    """Forward pass and losses of the tokens that have a target."""

    def __init__(self, parts: ParallelModel, mesh: Mesh, *, device: torch.device) -> None:
        super().__init__(parts, mesh, device=device)
        self._own_l = None if self.tokens_l is None else self.tokens_l.cpu()
        self._vocab_size = int(parts.model.config.vocab_size)  # type: ignore[arg-type,union-attr]
        self._right = torch.zeros(())
        self.token_losses.watch = self._count

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches."""
        part = super().backward(self._select_predicted(batches))
        hidden = part.sums.get(PREDICTED, part.divisor)
        return part._replace(sums=self._sums(hidden))

    def forward(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run only forward passes; counts the hidden tokens, too."""
        frequency_V = torch.zeros(self._vocab_size, dtype=torch.int64)
        part = super().forward(self._iter_selected(batches, frequency_V))
        frequency = frequency_V.to(self._device, torch.float64)
        hidden = part.sums.get(PREDICTED, part.divisor)
        return part._replace(sums={**part.sums, **self._sums(hidden), "frequency": frequency})

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Share of hidden tokens that are guessed; of an evaluation that of the most frequent one
        among them, too, which always saying it would guess."""
        told = {"masked_accuracy": sums["right"] / sums["hidden"]}
        if "frequency" in sums:
            told["most_frequent_token"] = sums["frequency"].max() / sums["hidden"]
        return told

    def targets(self, batch: MicroBatch) -> Tensor:
        """Return the targets of the picked tokens of all tp ranks (1, T x N)."""
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

    def _iter_selected(
        self, batches: Iterable[MicroBatch], frequency_V: Tensor
    ) -> Iterator[MicroBatch]:
        """Micro-batches as their turn comes; adds to how often each token is hidden."""
        for batch in batches:
            if self._mesh.speaks_for_samples:
                hidden_N = batch["targets"][batch["targets"] != IGNORED]
                frequency_V += torch.bincount(hidden_N, minlength=self._vocab_size)
            yield self._select_predicted([batch])[0]

    def _select_predicted(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
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


_MASKED, _RANDOM = 0.8, 0.1
_MASK_TOKENS = ("[MASK]", "<mask>")
_MARKS = ("[CLS]", "[SEP]", "[PAD]")


class MaskedLM(LanguageTask):
    """Masked language modelling: the targets are the hidden tokens; the head computes only them."""

    @staticmethod
    def preparation(resolved: Resolved, split: str) -> Prepare:
        """Hides tokens of a micro-batch, where it is read."""
        tokenizer_size = resolved.data.vocab_size
        mask_id = mask_token_id(
            Path(resolved.data.dir) / "tokenizer.json",
            vocab_size=vocabulary(resolved),
            tokenizer_size=tokenizer_size,
        )
        return Masking(
            seed=resolved.recipe.run.seed, split=split, mask_id=mask_id, vocab_size=tokenizer_size,
            marks=mark_ids(Path(resolved.data.dir) / "tokenizer.json"),
        )  # fmt: skip

    @staticmethod
    def compute(
        parts: ParallelModel,
        mesh: Mesh,
        *,
        recipe: Recipe,  # noqa: ARG004
        device: torch.device,
    ) -> MaskedTokens:
        """By the losses of hidden tokens."""
        return MaskedTokens(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples that hide as many tokens as on average."""
        batch = LanguageTask.empty_batch(recipe)
        parallel = recipe.parallel
        assert isinstance(parallel.cp, int) and isinstance(parallel.tp, int), "resolved"
        of_rank = batch["tokens"].numel() // (parallel.cp * parallel.tp)
        rows = min(of_rank, predicted_rows(of_rank))
        predicted = torch.zeros(1, rows, dtype=torch.int64)
        return batch.with_fields(
            predicted=predicted, predicted_targets=predicted.repeat(1, parallel.tp)
        )


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Turns a micro-batch of text into one to learn from; runs where samples are read."""

    seed: int
    split: str
    mask_id: int
    vocab_size: int
    """Vocabulary size of the tokenizer, from which random tokens are drawn."""
    marks: tuple[int, ...] = ()
    """Tokens that are never hidden: those that hold samples of BERT together."""

    def __call__(self, batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:
        """The micro-batch with hidden tokens, and targets where they are hidden.

        Args:
            lengths_B: Tokens of each row; what follows is padding.
        """
        places_L = torch.arange(batch["tokens"].shape[1])
        is_text_BL = places_L < lengths_B[:, None]
        key_B1 = random_bits(key_of(self.seed, "masking", self.split), batch.samples_B)[:, None]
        draws_L = 3 * places_L
        can_be_hidden_BL = is_text_BL & ~torch.isin(batch["tokens"], torch.tensor(self.marks))
        is_chosen_BL = _choose(key_B1, draws_L, is_text_BL=can_be_hidden_BL)
        share_BL = _uniform(key_B1, draws_L + 1)
        random_BL = random_bits(key_B1, draws_L + 2).remainder(self.vocab_size)
        hidden_BL = torch.where(share_BL < _MASKED, self.mask_id, random_BL)
        hidden_BL = torch.where(share_BL < _MASKED + _RANDOM, hidden_BL, batch["tokens"])
        return batch.with_fields(
            tokens=torch.where(is_chosen_BL, hidden_BL, batch["tokens"]),
            targets=torch.where(is_chosen_BL, batch["tokens"], IGNORED),
            # each token of padding is a document of its own, which no text attends to
            positions=batch["positions"] * is_text_BL,
        )


def mask_token_id(tokenizer_file: Path, *, vocab_size: int, tokenizer_size: int) -> int:
    """Id of the mask token: the tokenizer's own, or the last row of the model's embedding.

    Raises:
        RequestError: The tokenizer has none, and uses every row.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    for token in _MASK_TOKENS:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return int(found)
    if tokenizer_size < vocab_size:
        return vocab_size - 1
    raise RequestError(
        f"task.name=masked_lm: the tokenizer has none of {', '.join(_MASK_TOKENS)}, and its "
        f"{tokenizer_size:,} tokens use every row of the model's embedding. Use a tokenizer that "
        "has one, or a smaller data.vocab_size."
    )


def mark_ids(tokenizer_file: Path) -> tuple[int, ...]:
    """Ids of the tokens that hold samples of BERT together, of a tokenizer that has them."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    found = (tokenizer.token_to_id(token) for token in _MARKS)
    return tuple(id for id in found if id is not None)


def _choose(key_B1: Tensor, counters_L: Tensor, *, is_text_BL: Tensor) -> Tensor:
    """Choose the tokens to predict: at least one of each row that has text."""
    is_chosen_BL = is_text_BL & ~keep_mask(key_B1, counters_L, drop=MASKED_SHARE)
    draw_BL = random_bits(key_B1, counters_L).bitwise_right_shift(11).bitwise_and(2**53 - 1)
    nearest_B1 = torch.where(is_text_BL, draw_BL, 2**53).argmin(dim=1, keepdim=True)
    has_none_B1 = ~is_chosen_BL.any(dim=1, keepdim=True)
    is_nearest_BL = torch.zeros_like(is_chosen_BL).scatter(1, nearest_B1, value=True)
    return is_chosen_BL | (is_nearest_BL & has_none_B1 & is_text_BL)


def _uniform(key: Tensor, counter: Tensor) -> Tensor:
    """In [0, 1), fp64."""
    return (random_bits(key, counter) & (2**53 - 1)).double() * 2.0**-53
