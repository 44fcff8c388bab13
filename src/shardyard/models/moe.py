"""A mixture of experts in place of a block's MLP: each token visits the few that its router picks.

The same function as transformers' own block, which packs two matrices of an expert into one and
visits the experts one after the other. Here each matrix is a parameter, so that it can be split;
tokens are sorted by expert and go through one grouped product; none is dropped.

Shape suffixes: B = samples, L = tokens of a sample, T = all tokens, D = width, E = experts,
K = experts that a token visits, N = T x K visits, F = width of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.families.shape import ModelShape
from shardyard.models.grad_scale import LossScale
from shardyard.models.random import SampleKeys
from shardyard.rundir.jsonl import ROUTER_KEYS

# ``grouped_product`` multiplies rows that are sorted by expert, each by its expert's matrix.
#
# It wraps torch's grouped product in operators of this package. In torch 2.13 that rejects matrices
# whose rows are no multiple of 16 bytes, empty ones, and fake ones unless they are bf16. These
# operators then multiply expert by expert, so callers need not distinguish the cases.
#
# Shape suffixes: N = rows, E = experts, I = width in, O = width out.

_ALIGNED_BYTES = 16


def grouped_product(x_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of each expert times its own matrix, transposed: (N, O).

    Args:
        x_NI: Rows, those of expert 0 first.
        ends_E: int32, on the device: where the rows of each expert end.
    """
    y_NO: Tensor = _product(x_NI, w_EOI, ends_E)
    return y_NO


@torch.library.custom_op("shardyard::grouped_product", mutates_args=())
def _product(x_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    w_EIO = w_EOI.transpose(1, 2)
    if _is_aligned(x_NI, w_EOI, w_EIO):
        return F.grouped_mm(x_NI, w_EIO, offs=ends_E)
    pieces = _pieces(x_NI, ends_E)
    return torch.cat([x @ w for x, w in zip(pieces, w_EIO.unbind(), strict=True)])


@torch.library.custom_op("shardyard::grouped_outer_product", mutates_args=())
def _outer_product(g_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
    """For each expert the sum over its rows of g x: the gradient of its matrix, (E, O, I)."""
    if _is_aligned(g_NO, x_NI):
        return F.grouped_mm(g_NO.t(), x_NI, offs=ends_E)
    pieces = zip(_pieces(g_NO, ends_E), _pieces(x_NI, ends_E), strict=True)
    return torch.stack([g.t() @ x for g, x in pieces])


@_product.register_fake
def _(x_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:  # noqa: ARG001
    return x_NI.new_empty(x_NI.shape[0], w_EOI.shape[1])


@_outer_product.register_fake
def _(g_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty(ends_E.shape[0], g_NO.shape[1], x_NI.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_NI, w_EOI, ends_E = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()
    needs_x, needs_w, _ = ctx.needs_input_grad
    # the same product with the matrices the other way round
    grad_NI = _product(grad_NO, w_EOI.transpose(1, 2), ends_E) if needs_x else None
    return grad_NI, _outer_product(grad_NO, x_NI, ends_E) if needs_w else None, None


_product.register_autograd(_backward, setup_context=_save)

SAVED_OPERATORS = {torch.ops.shardyard.grouped_product.default}
"""Costly results, which selective recompute keeps."""


def _is_aligned(*matrices: Tensor) -> bool:
    return all(
        matrix.numel() and max(matrix.stride()[-2:]) * matrix.element_size() % _ALIGNED_BYTES == 0
        for matrix in matrices
    )


def _pieces(x: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """Rows of each expert. Waits for the device: it asks where they end."""
    return x.tensor_split(ends_E[:-1].tolist())


# ``RouterLoss`` keeps a router balanced and its logits small, and ``RouterTotals`` measures it.
#
# The load-balance loss of a block and sample is E x sum over experts of (its share of the visits) x
# (its mean probability); it is 1 when all are visited alike (Fedus et al. 2021, arXiv:2101.03961,
# section 2.2; sample by sample as in DeepSeek-V3, arXiv:2412.19437, section 2.1.2). For each sample
# it depends only on that sample; for each micro-batch it would depend on the other samples in it.
# The router z-loss of a block and token is the squared log-sum-exp of the logits (Zoph et al. 2022,
# arXiv:2202.08906, section 3.1).
#
# Both count all tokens of a sample, whether they are predicted or not, and no padding. For a step
# they are means over its tokens, so a sample's balance loss counts once for each of its tokens.
# Their gradients enter at the block's output. The training loss stays a sum over predicted tokens,
# by whose number the step divides all gradients; ``RouterWeight`` makes up for that.
#
# Shape suffixes: B = samples, L = tokens of a sample on this rank, D = width, E = experts,
# K = experts that a token visits.


class RouterStatistics(NamedTuple):
    """Statistics of a step's routers, on the device; all fp64 scalars."""

    largest_load: Tensor
    """Visits of the busiest expert of any block, as a multiple of the block's mean."""
    balance_loss: Tensor
    """Mean over samples and blocks; 1 is even."""
    z_loss: Tensor
    """Mean over tokens and blocks."""


class RouterTotals:
    """Totals of the routers since the last step, block by block: a ``Statistics``."""

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
        """Return all totals of this rank in one row of numbers, and restart them."""
        totals, self._totals = self._totals, None
        if totals is None:
            totals = torch.zeros(self._shape, dtype=torch.float64, device=device)
        return totals.flatten()

    def give_back(self, summed: Tensor, *, skipped: Tensor) -> RouterStatistics:  # noqa: ARG002
        """Return the statistics for the metrics line; none are kept."""
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
    """Factor from sums over tokens to means where gradients are divided by predicted tokens."""

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
    """Losses of one block's router. It adds only a gradient to the output."""

    block: int
    balance: float
    """Weight of the load-balance loss."""
    z: float
    """Weight of the z-loss."""
    keys: SampleKeys
    """Keys that mark rows and tokens as padding, which has no weight."""
    totals: RouterTotals
    weight: RouterWeight = field(default_factory=RouterWeight)
    scale: LossScale = field(default_factory=LossScale)
    copies: int = 1
    """Count of ranks that compute the same tokens: each provides its part of the sums."""
    tokens_group: dist.ProcessGroup | None = field(default=None, repr=False)
    """Ranks that share the tokens of a sample; None: they are whole."""

    def __call__(
        self, y_BLD: Tensor, logits_BLE: Tensor, probability_BLE: Tensor, expert_BLK: Tensor
    ) -> Tensor:
        """The block's output, behind which the gradients of the losses enter."""
        counts_BL, lengths_B = self._counted(expert_BLK)
        visits_BE = _count_assignments(expert_BLK, counts_BL, experts=logits_BLE.shape[-1])
        share_BE = self._load_fraction(visits_BE, lengths_B * expert_BLK.shape[-1])
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

    def _load_fraction(self, assignments_BE: Tensor, of_sample_B: Tensor) -> Tensor:
        """Each expert's share of the visits of a whole sample, of which there are so many."""
        if self.tokens_group is not None:
            assignments_BE = assignments_BE.clone()
            dist.all_reduce(assignments_BE, group=self.tokens_group)
        return assignments_BE / of_sample_B.clamp(min=1)[:, None]


def _count_assignments(expert_BLK: Tensor, counts_BL: Tensor, *, experts: int) -> Tensor:
    """Count the visits to each expert by those tokens of a sample that count, (B, E)."""
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


class Experts(nn.Module):
    """The experts that this rank holds: gated MLPs, one grouped product a matrix."""

    def __init__(self, *, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Each visit through its expert.

        Args:
            x_ND: Visits sorted by expert.
            counts_E: How many each expert has.
        """
        ends_E = counts_E.cumsum(0).to(torch.int32)
        gate_NF = F.silu(grouped_product(x_ND, self.gate, ends_E))
        up_NF = grouped_product(x_ND, self.up, ends_E)
        return grouped_product(gate_NF * up_NF, self.down, ends_E)


class SparseMLP(nn.Module):
    """A router and its experts."""

    router_loss: RouterLoss | None = None
    """Loss that balances the router while it trains. None: no such loss."""
    dispatch: Callable[[Experts, Tensor, Tensor], Tensor] | None = None
    """Takes sorted visits to their experts and back where other ranks hold some of them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.experts = Experts(
            experts=shape.num_experts,
            width=shape.hidden_size,
            inner=shape.expert_width,
        )
        self._experts_per_token = shape.num_experts_per_tok

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The sum of the visited experts' outputs, weighted by the router; (B, L, D)."""
        logits_BLE = self.router(x_BLD)
        # In fp32, as transformers does: rounded probabilities could choose other experts.
        probability_BLE = torch.softmax(logits_BLE.float(), dim=-1)
        weight_BLK, expert_BLK = torch.topk(probability_BLE, self._experts_per_token, dim=-1)
        weight_BLK = (weight_BLK / weight_BLK.sum(dim=-1, keepdim=True)).to(x_BLD.dtype)

        visit_N = expert_BLK.flatten()
        # Stable: equal keys keep their order, so that sums over an expert's rows repeat exactly.
        order_N = torch.argsort(visit_N, stable=True)
        place_N = inverse(order_N)
        counts_E = count(visit_N, logits_BLE.shape[-1])
        sorted_ND = take_rows(x_BLD.flatten(0, 1), order_N, place_N, copies=self._experts_per_token)
        if self.dispatch is None:
            sorted_ND = self.experts(sorted_ND, counts_E)
        else:
            sorted_ND = self.dispatch(self.experts, sorted_ND, counts_E)
        y_ND = take_rows(sorted_ND, place_N, order_N)
        y_BLKD = y_ND.view(*expert_BLK.shape, -1)
        y_BLD = (weight_BLK[..., None, :] @ y_BLKD)[..., 0, :]
        if self.training and self.router_loss is not None:
            y_BLD = self.router_loss(y_BLD, logits_BLE, probability_BLE, expert_BLK)
        return y_BLD


def inverse(order_N: Tensor) -> Tensor:
    """Return the place of each unsorted row among the sorted rows."""
    return torch.empty_like(order_N).scatter_(
        0, order_N, torch.arange(len(order_N), device=order_N.device)
    )


def count(visit_N: Tensor, experts: int) -> Tensor:
    """Visits of each expert, int64 (E). Unlike ``bincount`` it does not wait for the device."""
    zeros_E = torch.zeros(experts, dtype=torch.int64, device=visit_N.device)
    return zeros_E.scatter_add_(0, visit_N, torch.ones_like(visit_N))


def take_rows(x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, *, copies: int = 1) -> Tensor:
    """Rows in another order, each ``copies`` times; (T x copies, D).

    Args:
        order_N: Which copy comes when: row ``order_N // copies``.
        inverse_N: Its inverse. With it the gradient is a sum in a fixed order, unlike that of an
            index, so that two runs on one device are equal.
    """
    rows_ND: Tensor = _Rows.apply(x_TD, order_N, inverse_N, copies)  # type: ignore[no-untyped-call]
    return rows_ND


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.copies = copies
        return x_TD[order_N if copies == 1 else order_N // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        grad_ND = grads[0][place_N]
        if ctx.copies > 1:
            grad_ND = grad_ND.view(-1, ctx.copies, grad_ND.shape[-1]).sum(dim=1)
        return grad_ND, None, None, None
