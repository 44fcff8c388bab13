"""Prefer one of two answers: DPO, IPO and ORPO on packed pairs of dialogues."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import MicroBatch
from shardyard.data.preference.samples import AnswerPairs, match_most_pairs
from shardyard.data.samples import Prepare, SampleSet
from shardyard.data.shards import LEARNT, TokenShards
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.causal_lm import CausalLM, mask_untrained_targets
from shardyard.tasks.language import vocabulary
from shardyard.tasks.preference_losses import PreferenceLosses


class Preference(CausalLM):
    """The preferred answer of a pair becomes likelier than the other."""

    @classmethod
    def samples(cls, resolved: Resolved, split: str) -> AnswerPairs:
        """Return the pairs that a split is made of."""
        data = resolved.recipe.data
        return AnswerPairs(
            TokenShards(Path(resolved.data.dir), split, vocab_size=vocabulary(resolved)),
            seq_len=int(data.seq_len),
            too_long=data.too_long,
            columns=(LEARNT,),
        )

    @classmethod
    def preparation(cls, resolved: Resolved, split: str) -> Prepare:  # noqa: ARG003
        """Takes the targets outside of answers away."""
        return mask_untrained_targets

    @classmethod
    def match_forms(cls, sets: Sequence[SampleSet]) -> None:
        """Let samples of all sources have room for equally many pairs."""
        match_most_pairs(sets)

    @staticmethod
    def compute(
        parts: ParallelModel, mesh: Mesh, *, recipe: Recipe, device: torch.device
    ) -> PreferenceLosses:
        """By the losses of pairs."""
        return PreferenceLosses(parts, mesh, recipe=recipe, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples of one pair each."""
        batch = CausalLM.empty_batch(recipe)
        samples = len(batch.samples_B)
        return batch.with_fields(
            documents=torch.zeros_like(batch["tokens"]),
            pairs=torch.zeros(samples, 1, dtype=torch.int64),
            reference=torch.zeros(samples, 1, 2, dtype=torch.float64),
        )

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of a pair, and the rewards of its answers."""
        return {"loss": loss, **means}
