"""Cross-entropy that holds little: one fp32 number a logit, also where ranks split the vocabulary.

torch's own keeps fp32 copies of the logits, of their log-probabilities and of their gradients, 12
bytes a logit beside the logits; here the probabilities become the gradient in place. Where even
that is too much, ``chunked_loss.py`` asks for some tokens at a time. Where the vocabulary is split
no rank ever holds all logits: three numbers a token pass between the ranks, the largest logit, the
sum of exponentials, and the logit of the target.

Shape suffixes: N = tokens, v = this rank's part of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.data.micro_batch import IGNORED
from shardyard.models.grad_scale import LossScale


@dataclass(kw_only=True)
class VocabLoss:
    """Cross-entropy of this rank's logits."""

    group: dist.ProcessGroup | None = None
    """Ranks that split the vocabulary; None: it is whole."""
    first: int = 0
    """Token id of this rank's first logit."""
    watch: Callable[[Tensor, Tensor], None] | None = None
    """Shown all logits and targets beside, all at once or chunk by chunk."""
    scale: LossScale = field(default_factory=LossScale)
    """What all losses of the model begin their gradients with."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over predicted tokens in nats, fp32; 0 if none counts.

        Args:
            logits: (..., V), or this rank's (..., v).
            targets: Token ids (...) or ``IGNORED``.
        """
        if self.watch is not None:
            self.watch(logits, targets)
        loss: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, -2), targets.flatten(), self.group, self.first
        )
        return self.scale.on(loss)

    @torch.no_grad()
    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of the predicted tokens, how many have the largest of their logits; fp64.

        Of equally large ones the first counts, as with ``argmax``.
        """
        logits_Nv, targets_N = logits.flatten(0, -2), targets.flatten()
        if logits_Nv.shape[1]:
            largest_N, column_N = logits_Nv.max(dim=1)
        else:
            largest_N = logits_Nv.new_full((len(logits_Nv),), -torch.inf)
            column_N = torch.zeros_like(targets_N)
        token_N = column_N + self.first
        if self.group is not None:
            of_all_N = largest_N.clone()
            dist.all_reduce(of_all_N, dist.ReduceOp.MAX, group=self.group)
            token_N.masked_fill_(largest_N < of_all_N, torch.iinfo(torch.int64).max)
            dist.all_reduce(token_N, dist.ReduceOp.MIN, group=self.group)
        return (token_N == targets_N).sum().double()

    def with_gradient(self, logits_Nv: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its gradient by the logits, in their format and scaled; autograd records
        neither."""
        if self.watch is not None:
            self.watch(logits_Nv, targets_N)
        dtype = logits_Nv.dtype
        with torch.no_grad():
            loss, known = _sum(logits_Nv, targets_N, self.group, self.first)
            del logits_Nv
            weight_N = known.counts_N.float()
            if self.scale.factor is not None:  # before rounding to a format that needs it
                weight_N *= self.scale.factor
            return loss, _gradient(known, weight_N).to(dtype)


class _Known(NamedTuple):
    """What the gradient is made of."""

    probability_Nv: Tensor
    """fp32; becomes the gradient in place."""
    column_N: Tensor
    """Of the target, where this rank holds it."""
    is_here_N: Tensor
    counts_N: Tensor
    """Whether a token has a target."""


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        group: dist.ProcessGroup | None,
        first: int,
    ) -> Tensor:
        loss, known = _sum(logits_Nv, targets_N, group, first)
        ctx.save_for_backward(*known)
        ctx.dtype = logits_Nv.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        known = _Known(*ctx.saved_tensors)  # used once: there is one backward pass
        return _gradient(known, known.counts_N * grads[0]).to(ctx.dtype), None, None, None


def _sum(
    logits_Nv: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None, first: int
) -> tuple[Tensor, _Known]:
    size = logits_Nv.shape[1]
    lowest_N = logits_Nv.new_full((len(logits_Nv),), -torch.inf, dtype=torch.float32)
    largest_N = logits_Nv.amax(dim=1).float() if size else lowest_N
    if group is not None:
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    column_N = targets_N - first
    is_here_N = (column_N >= 0) & (column_N < size)
    column_N = column_N.masked_fill(~is_here_N, 0)
    exp_Nv = logits_Nv.to(torch.float32, copy=True).sub_(largest_N[:, None]).exp_()
    # one all-reduce for both: sum of exponentials, and the target's logit where it is held
    sums_2N = torch.stack([exp_Nv.sum(dim=1), torch.zeros_like(largest_N)])
    if size:
        target_N = logits_Nv.gather(1, column_N[:, None])[:, 0].float() - largest_N
        sums_2N[1] = target_N.masked_fill(~is_here_N, 0.0)
    if group is not None:
        dist.all_reduce(sums_2N, group=group)
    counts_N = targets_N != IGNORED
    probability_Nv = exp_Nv.div_(sums_2N[0][:, None])
    loss = ((sums_2N[0].log() - sums_2N[1]) * counts_N).sum()
    return loss, _Known(probability_Nv, column_N, is_here_N, counts_N)


def _gradient(known: _Known, weight_N: Tensor) -> Tensor:
    """fp32; ``weight_N`` is what a token's loss counts."""
    grad_Nv = known.probability_Nv.mul_(weight_N[:, None])
    if grad_Nv.shape[1]:
        weight_N = weight_N * known.is_here_N
        grad_Nv.scatter_add_(1, known.column_N[:, None], -weight_N[:, None])
    return grad_Nv
