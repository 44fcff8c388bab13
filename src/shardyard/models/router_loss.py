"""Losses that keep a router balanced and its logits small, and how balanced it is.

Load balance, for each block and sample: E x sum over experts of (its share of the visits) x (its
mean probability); 1 when all are visited alike (Fedus et al. 2021, arXiv:2101.03961, section 2.2;
sample by sample as in DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Over one sample it depends on
nothing but the sample; over a micro-batch it would depend on who else is in it. Router z-loss, for
each block and token: the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv:2202.08906,
section 3.1).

Both count all tokens of a sample, whether they are learnt or not, and no padding. Of a step they
are means over its tokens: a sample's balance loss counts as often as it has tokens. Their gradients
enter where they arise. The training loss stays what it is: a sum over predicted tokens, by whose
number all gradients are divided at last; ``RouterWeight`` makes up for that.

Shape suffixes: B = samples, L = tokens of a sample on this rank, D = width, E = experts,
K = experts that a token visits.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.models.dropout import SampleKeys
from shardyard.models.grad_scale import LossScale
from shardyard.rundir.metric_keys import ROUTER_KEYS


class RouterStatistics(NamedTuple):
    """What the routers of a step did, on the device; all fp64 scalars."""

    largest_load: Tensor
    """Visits of the busiest expert of any block, as a multiple of the block's mean."""
    balance_loss: Tensor
    """Mean over samples and blocks; 1 is even."""
    z_loss: Tensor
    """Mean over tokens and blocks."""


class RouterTotals:
    """What passed through the routers since the last step, block by block: a ``Statistics``."""

    metrics = ROUTER_KEYS

    def __init__(self, *, blocks: int, experts: int) -> None:
        self._shape = (blocks, experts + 3)
        self._totals: Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return self._shape[0] * self._shape[1]

    def add(self, block: int, row: Tensor) -> None:
        """Add the visits of each expert, the two loss sums and the tokens of a micro-batch."""
        if self._totals is None:
            self._totals = torch.zeros(self._shape, dtype=torch.float64, device=row.device)
        self._totals[block] += row

    def take(self, device: torch.device) -> Tensor:
        """All totals of this rank in one row of numbers, which then begin anew."""
        totals, self._totals = self._totals, None
        if totals is None:
            totals = torch.zeros(self._shape, dtype=torch.float64, device=device)
        return totals.flatten()

    def give_back(self, summed: Tensor, *, skipped: Tensor) -> RouterStatistics:  # noqa: ARG002
        """For the metrics line; nothing is kept."""
        return self.statistics(summed)

    def statistics(self, summed: Tensor) -> RouterStatistics:
        """From the sum over ranks of what they took."""
        totals = summed.view(self._shape)
        visits, (balance, z, tokens) = totals[:, :-3], totals[:, -3:].sum(dim=0)
        return RouterStatistics(
            largest_load=(visits / visits.mean(dim=1, keepdim=True)).max(),
            balance_loss=balance / tokens,
            z_loss=z / tokens,
        )


class RouterWeight:
    """What makes sums over tokens into means where gradients are divided by predicted tokens."""

    factor: Tensor | None = None
    """Predicted tokens of the step / its tokens; fp32, on the device, changed in place between
    steps. None: 1."""

    def begin_step(self, predicted: int, tokens: int, *, device: torch.device) -> None:
        """Add up the counts of all ranks, which call it together. Waits for no device."""
        counts = torch.tensor([predicted, tokens], dtype=torch.float64, device=device)
        dist.all_reduce(counts)
        factor = (counts[0] / counts[1].clamp(min=1.0)).float()
        if self.factor is None:
            self.factor = factor
        else:
            self.factor.copy_(factor)


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """The losses of one block's router. Adds nothing to its output but a gradient."""

    block: int
    balance: float
    """Weight of the load-balance loss."""
    z: float
    """Weight of the z-loss."""
    keys: SampleKeys
    """Says which rows and tokens are padding: they count for nothing."""
    totals: RouterTotals
    weight: RouterWeight = field(default_factory=RouterWeight)
    scale: LossScale = field(default_factory=LossScale)
    copies: int = 1
    """Ranks that compute the same tokens: each stands for its part of the sums."""
    tokens_group: dist.ProcessGroup | None = field(default=None, repr=False)
    """Ranks that share the tokens of a sample; None: they are whole."""

    def __call__(
        self, y_BLD: Tensor, logits_BLE: Tensor, probability_BLE: Tensor, expert_BLK: Tensor
    ) -> Tensor:
        """The block's output, behind which the gradients of the losses enter."""
        counts_BL, lengths_B = self._counted(expert_BLK)
        visits_BE = _visits(expert_BLK, counts_BL, experts=logits_BLE.shape[-1])
        share_BE = self._share_of_visits(visits_BE, lengths_B * expert_BLK.shape[-1])
        # the sample's loss x its tokens: linear in probabilities, so ranks add their tokens' parts
        probability_BE = (counts_BL[..., None] * probability_BLE).sum(dim=1)
        balance = logits_BLE.shape[-1] * (share_BE * probability_BE).sum()
        z = (counts_BL * logits_BLE.float().logsumexp(dim=-1).square()).sum()
        row = torch.cat([visits_BE.sum(dim=0), torch.stack([balance, z, counts_BL.sum()]).detach()])
        loss = (self.balance * balance + self.z * z) / self.copies
        if self.weight.factor is not None:
            loss = loss * self.weight.factor
        loss = self.scale.on(loss)
        y: Tensor = _Enter.apply(y_BLD, loss, row / self.copies, self)  # type: ignore[no-untyped-call]
        return y

    def _counted(self, expert_BLK: Tensor) -> tuple[Tensor, Tensor]:
        """1 for each token of this rank that is no padding, else 0; how many the samples have."""
        samples_B, lengths_B = self.keys.samples_B, self.keys.lengths_B
        assert samples_B is not None
        mine_L = self.keys.computed_l
        length = expert_BLK.shape[1]
        if self.tokens_group is not None:
            length *= dist.get_world_size(self.tokens_group)
        if lengths_B is None:
            lengths_B = torch.full_like(samples_B, length)
        lengths_B = lengths_B * (samples_B >= 0)
        if mine_L is None:
            mine_L = torch.arange(length, device=lengths_B.device)
        return (mine_L < lengths_B[:, None]).float(), lengths_B

    def _share_of_visits(self, visits_BE: Tensor, of_sample_B: Tensor) -> Tensor:
        """Each expert's share of the visits of a whole sample, of which there are so many."""
        if self.tokens_group is not None:
            visits_BE = visits_BE.clone()
            dist.all_reduce(visits_BE, group=self.tokens_group)
        return visits_BE / of_sample_B.clamp(min=1)[:, None]


def _visits(expert_BLK: Tensor, counts_BL: Tensor, *, experts: int) -> Tensor:
    """How many of a sample's visits each expert gets of tokens that count, (B, E)."""
    count_BLK = counts_BL[..., None].expand(expert_BLK.shape)
    zeros_BE = torch.zeros(expert_BLK.shape[0], experts, device=expert_BLK.device)
    return zeros_BE.scatter_add_(1, expert_BLK.flatten(1), count_BLK.flatten(1))


class _Enter(torch.autograd.Function):
    """Lets a hidden state pass; on the way back a loss joins, with weight 1.

    Statistics are added on the way back too: a forward pass may be computed again.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, row: Tensor, router_loss: RouterLoss) -> Tensor:
        ctx.row, ctx.router_loss = row, router_loss
        ctx.loss_like = loss.new_ones(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.router_loss.totals.add(ctx.router_loss.block, ctx.row)
        return grads[0], ctx.loss_like, None, None
