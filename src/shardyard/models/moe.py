"""A mixture of experts in place of a block's MLP: each token visits the few that its router picks.

The same function as transformers' own block, which packs two matrices of an expert into one and
visits the experts one after the other. Here each matrix is a parameter, so that it can be split;
tokens are sorted by expert and go through one grouped product; none is dropped.

Shape suffixes: B = samples, L = tokens of a sample, T = all tokens, D = width, E = experts,
K = experts that a token visits, N = T x K visits, F = width of an expert.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.families.shape import ModelShape
from shardyard.models.grouped import grouped_product
from shardyard.models.router_loss import RouterLoss


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
    """What balances the router while it trains; None: nothing does."""
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
        self._visits = shape.num_experts_per_tok

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The sum of the visited experts' outputs, weighted by the router; (B, L, D)."""
        logits_BLE = self.router(x_BLD)
        probability_BLE = torch.softmax(logits_BLE.float(), dim=-1)
        weight_BLK, expert_BLK = torch.topk(probability_BLE, self._visits, dim=-1)
        weight_BLK = (weight_BLK / weight_BLK.sum(dim=-1, keepdim=True)).to(x_BLD.dtype)

        visit_N = expert_BLK.flatten()
        order_N = torch.argsort(visit_N, stable=True)
        place_N = inverse(order_N)
        counts_E = count(visit_N, logits_BLE.shape[-1])
        sorted_ND = take_rows(x_BLD.flatten(0, 1), order_N, place_N, copies=self._visits)
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
    """Where each row of the unsorted is among the sorted."""
    return torch.empty_like(order_N).scatter_(
        0, order_N, torch.arange(len(order_N), device=order_N.device)
    )


def count(visit_N: Tensor, experts: int) -> Tensor:
    """Visits of each expert, int64 (E). Unlike ``bincount`` it does not wait for the device."""
    zeros_E = torch.zeros(experts, dtype=torch.int64, device=visit_N.device)
    return zeros_E.scatter_add_(0, visit_N, torch.ones_like(visit_N))


def take_rows(x_TD: Tensor, order_N: Tensor, place_N: Tensor, *, copies: int = 1) -> Tensor:
    """Rows in another order, each ``copies`` times; (T x copies, D).

    Args:
        order_N: Which copy comes when: row ``order_N // copies``.
        place_N: Its inverse. With it the gradient is a sum in a fixed order, unlike that of an
            index, so that two runs on one device are equal.
    """
    rows_ND: Tensor = _Rows.apply(x_TD, order_N, place_N, copies)  # type: ignore[no-untyped-call]
    return rows_ND


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, place_N: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.copies = copies
        return x_TD[order_N if copies == 1 else order_N // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        grad_ND = grads[0][place_N]
        if ctx.copies > 1:
            grad_ND = grad_ND.view(-1, ctx.copies, grad_ND.shape[-1]).sum(dim=1)
        return grad_ND, None, None, None
