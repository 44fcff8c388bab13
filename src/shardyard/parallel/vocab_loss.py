"""Cross-entropy of logits whose vocabulary is split over ranks: none ever holds all of them.

Three numbers a token pass between the ranks: the largest logit, the sum of exponentials, and the
logit of the target. Shape suffixes: N = tokens, v = this rank's part of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardyard.data.loader import IGNORED


@dataclass(frozen=True, kw_only=True)
class VocabLoss:
    """Cross-entropy of this rank's logits."""

    group: dist.ProcessGroup | None = None
    """Ranks that split the vocabulary; None: it is whole."""
    first: int = 0
    """Token id of this rank's first logit."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over predicted tokens in nats, fp32; 0 if none counts.

        Args:
            logits: (..., V), or this rank's (..., v).
            targets: Token ids (...) or ``IGNORED``.
        """
        logits_Nv, targets_N = logits.flatten(0, -2).float(), targets.flatten()
        if self.group is None:
            return F.cross_entropy(logits_Nv, targets_N, ignore_index=IGNORED, reduction="sum")
        loss: Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_Nv, targets_N, self.group, self.first
        )
        return loss


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Nv: Tensor, targets_N: Tensor, group: dist.ProcessGroup, first: int
    ) -> Tensor:
        size = logits_Nv.shape[1]
        largest_N = logits_Nv.amax(dim=1) if size else logits_Nv.new_full((len(logits_Nv),), -1e30)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        exp_Nv = torch.exp(logits_Nv - largest_N[:, None])
        column_N = targets_N - first
        is_here_N = (column_N >= 0) & (column_N < size)
        column_N = column_N.masked_fill(~is_here_N, 0)
        # one all-reduce for both: sum of exponentials, and the target's logit where it is held
        sums_2N = torch.stack([exp_Nv.sum(dim=1), torch.zeros_like(largest_N)])
        if size:
            target_N = logits_Nv.gather(1, column_N[:, None])[:, 0] - largest_N
            sums_2N[1] = target_N.masked_fill(~is_here_N, 0.0)
        dist.all_reduce(sums_2N, group=group)
        counts_N = targets_N != IGNORED
        ctx.save_for_backward(exp_Nv / sums_2N[0][:, None], column_N, is_here_N, counts_N)
        return ((sums_2N[0].log() - sums_2N[1]) * counts_N).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probability_Nv, column_N, is_here_N, counts_N = ctx.saved_tensors
        grad_Nv = probability_Nv
        if grad_Nv.shape[1]:
            minus_one_N = -is_here_N.to(grad_Nv.dtype)
            grad_Nv = grad_Nv.scatter_add(1, column_N[:, None], minus_one_N[:, None])
        return grad_Nv * (counts_N * grads[0])[:, None], None, None, None
