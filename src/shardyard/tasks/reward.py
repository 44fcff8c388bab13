"""Reward models: a head of one number on the last token of each answer, learnt from pairs.

The loss of a pair is -log sigmoid(chosen reward - rejected reward), as of Bradley and Terry. Shape
suffixes: B = samples, L = tokens of a sample, P = most pairs in a sample, R = 2P answers of a
sample.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import MicroBatch
from shardyard.data.preference.samples import RatedPairs, match_most_pairs
from shardyard.data.samples import SampleSet
from shardyard.data.shards import TokenShards
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.language import LanguageTask, vocabulary
from shardyard.tasks.preference_losses import PairLosses, SumOverRanks


class RewardLosses(PairLosses):
    """Losses of the rewards of both answers."""

    def __init__(
        self, parts: ParallelModel, mesh: Mesh, *, recipe: Recipe, device: torch.device
    ) -> None:
        super().__init__(parts, mesh, device=device)
        self._center_rewards = recipe.task.center_rewards
        self._groups = [mesh.group(axis) for axis in ("tp", "cp") if getattr(mesh.layout, axis) > 1]
        self._local_l = None if parts.local_l is None else parts.local_l.cpu()

    def located(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the tokens that the head reads, of those that this rank holds.

        Where another rank holds the last token of an answer, the head reads any, without weight.
        """
        reads_BR, width = batch["reads"].flatten(1), batch["tokens"].shape[1]
        is_here_BR = (batch["pairs"] >= 0).repeat_interleave(2, dim=1)
        if self._local_l is not None:
            places_L = torch.full((width,), -1)
            width = len(self._local_l)
            places_L[self._local_l] = torch.arange(width)
            reads_BR = places_L[reads_BR]
            is_here_BR = is_here_BR & (reads_BR >= 0)
        first_B1 = width * torch.arange(len(reads_BR))[:, None]
        predicted_1N = (first_B1 + reads_BR.clamp(min=0)).flatten()[None]
        return batch.with_fields(predicted=predicted_1N, is_here=is_here_BR)

    def targets(self, batch: MicroBatch) -> Tensor:
        """Return which rewards this rank computes, and where there is a pair, (B, R + P)."""
        return torch.cat([batch["is_here"], batch["pairs"] >= 0], dim=1).long()

    def loss(self, outputs: Tensor, targets: Tensor, *, in_training: bool) -> Tensor:  # noqa: ARG002
        """Sum of the losses of pairs, fp32, not scaled."""
        reward_BP2, is_pair_BP = self.rewards(outputs, targets)
        chosen, rejected = reward_BP2.unbind(-1)
        loss_BP = -F.logsigmoid(chosen - rejected)
        if self._center_rewards:
            loss_BP = loss_BP + self._center_rewards * (chosen + rejected).square()
        return torch.where(is_pair_BP, loss_BP, 0.0).sum().float()

    def rewards(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of both answers (B, P, 2), fp64, and where there is a pair (B, P)."""
        pairs = targets.shape[1] // 3
        # a pipeline fills up with batches whose targets are all IGNORED
        is_here_BR, is_pair_BP = torch.split(targets == 1, [2 * pairs, pairs], dim=1)
        reward_BR = outputs[0, :, 0].double().view(is_here_BR.shape)
        reward_BR = torch.where(is_here_BR, reward_BR, 0.0)
        for group in self._groups:
            reward_BR = SumOverRanks.apply(reward_BR, group)  # type: ignore[no-untyped-call]
        return reward_BR.view(len(targets), pairs, 2), is_pair_BP


class Reward(LanguageTask):
    """The reward of the preferred answer of a pair becomes higher than that of the other."""

    @classmethod
    def samples(cls, resolved: Resolved, split: str) -> RatedPairs:
        """Return the pairs that a split is made of."""
        data = resolved.recipe.data
        shards = TokenShards(Path(resolved.data.dir), split, vocab_size=vocabulary(resolved))
        return RatedPairs(shards, seq_len=int(data.seq_len), too_long=data.too_long)

    @classmethod
    def match_forms(cls, sets: Sequence[SampleSet]) -> None:
        """Let samples of all sources have room for equally many pairs."""
        match_most_pairs(sets)

    @staticmethod
    def compute(
        parts: ParallelModel, mesh: Mesh, *, recipe: Recipe, device: torch.device
    ) -> RewardLosses:
        """By the losses of pairs."""
        return RewardLosses(parts, mesh, recipe=recipe, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples of one pair each."""
        batch = LanguageTask.empty_batch(recipe)
        samples = len(batch.samples_B)
        return batch.with_fields(
            pairs=torch.zeros(samples, 1, dtype=torch.int64),
            reads=torch.zeros(samples, 1, 2, dtype=torch.int64),
        )

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of a pair, and the rewards of its answers."""
        return {"loss": loss, **means}
