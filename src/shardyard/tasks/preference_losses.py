"""Losses of pairs of answers: from a micro-batch of packed pairs to the sum of the pairs' losses.

The reference model is the model as the run began. Its log-probabilities come with the data
(``train/reference.py``), so no second model is held. Shape suffixes: B = samples, l = tokens of a
sample that this rank computes, P = most pairs in a sample, D = 2P documents of a sample.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, assert_never

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.parallel.fsdp import reshard, summable
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.loss_computation import LossSums
from shardyard.tasks.token_losses import LanguageModel

_SUMS = ("right", "chosen", "rejected")


class _Aims(NamedTuple):
    """What the outputs of a micro-batch are compared with; a pipeline hands on one tensor."""

    targets_Bl: Tensor
    documents_Bl: Tensor
    reference_BP2: Tensor
    is_pair_BP: Tensor

    def joined(self) -> Tensor:
        """As fp64 (B, 2l + 3P), which holds every token id exactly."""
        reference_BD = self.reference_BP2.flatten(1)
        parts = (self.targets_Bl, self.documents_Bl, reference_BD, self.is_pair_BP)
        return torch.cat([part.double() for part in parts], dim=1)

    @classmethod
    def split(cls, joined: Tensor, tokens: int) -> "_Aims":
        """The parts again; where all is ``IGNORED``, as a pipeline fills up, there is no pair."""
        pairs = (joined.shape[1] - 2 * tokens) // 3
        sizes = [tokens, tokens, 2 * pairs, pairs]
        targets, documents, reference, is_pair = torch.split(joined, sizes, dim=1)
        return cls(targets.long(), documents.long(), reference.reshape(len(joined), pairs, 2),
                   is_pair == 1)  # fmt: skip


class PairLosses(LanguageModel):
    """Forward pass of pairs of answers, and the sums of their losses and rewards."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, *, in_training: bool) -> Tensor:
        """Sum of the losses of pairs, fp32, not scaled."""

    @abstractmethod
    def rewards(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of both answers (B, P, 2), fp64, and where there is a pair (B, P)."""

    def located(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with what its targets need, made in host memory."""
        return batch

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches."""
        return super().backward([self.located(batch) for batch in batches])

    def forward(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run only forward passes, and compare the answers."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total, divisor, sums = zero, 0, dict.fromkeys(_SUMS, zero)
        for batch in map(self.located, batches):
            divisor += self._divisor([batch])
            placed = self._placed(batch)
            outputs = self._through(self.inputs(placed))
            if outputs is None:
                continue
            aims = self.targets(placed)
            total = total + summable(self.loss(outputs, aims, in_training=False))
            for name, found in self._reward_sums(outputs, aims).items():
                sums[name] = sums[name] + found
        self.end_forward()
        counted = {name: self._counted(sums[name]) for name in _SUMS}
        return LossSums(
            self._counted(total), divisor, {**counted, "pairs": self._on_device(divisor)}
        )

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what evaluations report of rewards, from sums over all pairs."""
        if "pairs" not in sums:  # of a step
            return {}
        right, chosen, rejected = (sums[name] / sums["pairs"] for name in _SUMS)
        return {
            "accuracy": right, "margin": chosen - rejected,
            "chosen_reward": chosen, "rejected_reward": rejected,
        }  # fmt: skip

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum of the losses of pairs, fp32."""
        return self.loss_scale.on(self.loss(outputs, targets, in_training=True))

    def end_forward(self) -> None:
        """Let go of gathered weights after forward passes alone."""
        reshard(self.roots)

    def _reward_sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Sums over pairs of the rewards of both answers, and of those in the right order, fp64."""
        reward_BP2, is_pair_BP = self.rewards(outputs, targets)
        chosen, rejected = torch.where(is_pair_BP[..., None], reward_BP2, 0.0).unbind(-1)
        return {
            "right": (chosen > rejected).sum().double(),
            "chosen": chosen.sum(),
            "rejected": rejected.sum(),
        }

    def _counted(self, loss_sum: Tensor) -> Tensor:
        # each rank of tp and cp has computed the same losses
        counts = self._mesh.tensor_rank == self._mesh.context_rank == 0
        return loss_sum if counts else torch.zeros_like(loss_sum)

    def _divisor(self, batches: Iterable[MicroBatch]) -> int:
        """Pairs of answers."""
        if not self._mesh.speaks_for_samples:
            return 0
        return sum(int((batch["pairs"] >= 0).sum()) for batch in batches)


class PreferenceLosses(PairLosses):
    """Losses of the log-probabilities of both answers."""

    def __init__(
        self, parts: ParallelModel, mesh: Mesh, *, recipe: Recipe, device: torch.device
    ) -> None:
        super().__init__(parts, mesh, device=device)
        task = recipe.task
        self._loss_type, self._beta = task.loss_type, task.beta
        self._label_smoothing = task.label_smoothing
        self._context = mesh.group("cp") if mesh.layout.cp > 1 else None

    def targets(self, batch: MicroBatch) -> Tensor:
        """Return all that the outputs of this rank's tokens are compared with, in one tensor."""
        return _Aims(
            self._local_tokens(batch["targets"]),
            self._local_tokens(batch["documents"]),
            batch["reference"],
            batch["pairs"] >= 0,
        ).joined()

    def log_probabilities(self, batch: MicroBatch) -> Tensor | None:
        """Log-probabilities of both answers of each pair (B, P, 2) in nats, fp64.

        None on ranks that do not count: those without the model's end, or with another's outputs.
        All ranks call it together.
        """
        placed = self._placed(batch)
        outputs = self._through(self.inputs(placed))
        if outputs is None:
            return None
        logp_BP2, _ = self._answers(outputs, self._aims(outputs, self.targets(placed)))
        counts = self._mesh.tensor_rank == self._mesh.context_rank == 0
        return logp_BP2 if counts else None

    def _aims(self, outputs: Tensor, targets: Tensor) -> _Aims:
        return _Aims.split(targets, tokens=outputs.shape[1])

    def _answers(self, outputs: Tensor, aims: _Aims) -> tuple[Tensor, Tensor]:
        """Log-probability of each answer, and its number of tokens, (B, P, 2), fp64."""
        loss_Bl = self.token_losses.by_token(outputs, aims.targets_Bl).double()
        pairs = aims.is_pair_BP.shape[1]
        numbers_D = torch.arange(2 * pairs, device=loss_Bl.device)
        is_of_BlD = (aims.documents_Bl[..., None] == numbers_D) & (
            aims.targets_Bl != IGNORED
        )[..., None]  # fmt: skip
        # by products, as scattered sums are in another order each time on an accelerator
        logp_BD = -(loss_Bl[..., None] * is_of_BlD).sum(dim=1)
        tokens_BD = is_of_BlD.sum(dim=1).double()
        if self._context is not None:
            logp_BD = SumOverRanks.apply(logp_BD, self._context)  # type: ignore[no-untyped-call]
            dist.all_reduce(tokens_BD, group=self._context)
        shape = (len(logp_BD), pairs, 2)
        return logp_BD.view(shape), tokens_BD.view(shape)

    def loss(self, outputs: Tensor, targets: Tensor, *, in_training: bool) -> Tensor:
        """Sum of the losses of pairs, fp32, not scaled."""
        smoothing = self._label_smoothing if in_training else 0.0
        aims = self._aims(outputs, targets)
        logp_BP2, tokens_BP2 = self._answers(outputs, aims)
        loss_BP = self._loss_of_pairs(logp_BP2, tokens_BP2, aims.reference_BP2, smoothing)
        return torch.where(aims.is_pair_BP, loss_BP, 0.0).sum().float()

    def _loss_of_pairs(
        self, logp_BP2: Tensor, tokens_BP2: Tensor, reference_BP2: Tensor, smoothing: float
    ) -> Tensor:
        beta = self._beta
        match self._loss_type:
            case "sigmoid":
                chosen, rejected = (logp_BP2 - reference_BP2).unbind(-1)
                margin = beta * (chosen - rejected)
                wrong = 0.0 if not smoothing else smoothing * F.logsigmoid(-margin)
                return -(1 - smoothing) * F.logsigmoid(margin) - wrong
            case "ipo":  # of means over tokens, as the authors' and TRL's code
                ratio_BP2 = (logp_BP2 - reference_BP2) / tokens_BP2.clamp(min=1)
                chosen, rejected = ratio_BP2.unbind(-1)
                return (chosen - rejected - 1 / (2 * beta)).square()
            case "orpo":
                chosen, rejected = (logp_BP2 / tokens_BP2.clamp(min=1)).unbind(-1)
                log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
                return -chosen - beta * F.logsigmoid(log_odds)
            case _:
                assert_never(self._loss_type)

    def rewards(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of both answers of each pair (B, P, 2), fp64, and where there is a pair (B, P).

        A reward is beta times what training has added to the log-probability; with orpo, which has
        no reference, beta times the mean log-probability of a token.
        """
        aims = self._aims(outputs, targets)
        logp_BP2, tokens_BP2 = self._answers(outputs, aims)
        if self._loss_type == "orpo":
            return self._beta * logp_BP2 / tokens_BP2.clamp(min=1), aims.is_pair_BP
        return self._beta * (logp_BP2 - aims.reference_BP2), aims.is_pair_BP


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0, and of 0 a large negative number instead of infinity."""
    x = x.clamp(max=-1e-12)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


class SumOverRanks(torch.autograd.Function):
    """Sum of what the ranks of a group have; each takes the gradient of the whole to its part.

    All of them compute the same losses of the sum, which count once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None
