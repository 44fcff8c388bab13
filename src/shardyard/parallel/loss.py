"""Cross-entropy with little memory: one fp32 number a logit, also where ranks split the vocabulary.

torch's own keeps fp32 copies of the logits, of their log-probabilities and of their
gradients: 12 bytes a logit on top of the logits. Here the probabilities become the gradient
in place. Where even that is too much, ``compute_in_chunks`` handles some tokens at a time.
Where the vocabulary is split, no rank ever holds all logits. Three numbers a token pass
between the ranks: the largest logit, the sum of exponentials, and the logit of the target.

Shape suffixes: N = tokens, v = this rank's part of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.data.loader import IGNORED
from shardyard.models.grad_scale import LossScale
from shardyard.parallel.low_precision import add_product, matrix_of
from shardyard.parallel.tensor import OnShares


@dataclass(kw_only=True)
class VocabLoss:
    """Cross-entropy of this rank's logits."""

    group: dist.ProcessGroup | None = None
    """Ranks that split the vocabulary; None: it is whole."""
    first: int = 0
    """Token id of this rank's first logit."""
    watch: Callable[[Tensor, Tensor], None] | None = None
    """Callback that gets all logits and targets too, all at once or chunk by chunk."""
    scale: LossScale = field(default_factory=LossScale)
    """Scale at which all losses of the model begin their gradients."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over predicted tokens in nats, fp32; 0 if none counts.

        Args:
            logits: (..., V), or this rank's (..., v).
            targets: Token ids (...) or ``IGNORED``.
        """
        return self.scale.on(self.by_token(logits, targets).sum())

    def by_token(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each token in nats (...), fp32; 0 where none is predicted. Not scaled.

        Args:
            logits: (..., V), or this rank's (..., v).
            targets: Token ids (...) or ``IGNORED``.
        """
        if self.watch is not None:
            self.watch(logits, targets)
        loss_N: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, -2), targets.flatten(), self.group, self.first
        )
        return loss_N.view(targets.shape)

    @torch.no_grad()
    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Count the predicted tokens whose logit is the largest; fp64.

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
            loss_N, known = _losses(logits_Nv, targets_N, self.group, self.first)
            del logits_Nv
            weight_N = known.counts_N.float()
            if self.scale.factor is not None:  # before rounding to a format that needs it
                weight_N *= self.scale.factor
            return loss_N.sum(), _gradient(known, weight_N).to(dtype)


class _SavedForBackward(NamedTuple):
    """Data from which the gradient is computed."""

    probability_Nv: Tensor
    """fp32; becomes the gradient in place."""
    column_N: Tensor
    """Column of the target, where this rank holds it."""
    is_local_N: Tensor
    counts_N: Tensor
    """Whether a token has a target."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        group: dist.ProcessGroup | None,
        first: int,
    ) -> Tensor:
        loss_N, known = _losses(logits_Nv, targets_N, group, first)
        ctx.save_for_backward(*known)
        ctx.dtype = logits_Nv.dtype
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        known = _SavedForBackward(*ctx.saved_tensors)  # used once: there is one backward pass
        return _gradient(known, known.counts_N * grads[0]).to(ctx.dtype), None, None, None


def _losses(
    logits_Nv: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None, first: int
) -> tuple[Tensor, _SavedForBackward]:
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
    loss_N = (sums_2N[0].log() - sums_2N[1]) * counts_N
    return loss_N, _SavedForBackward(probability_Nv, column_N, is_here_N, counts_N)


def _gradient(saved: _SavedForBackward, weight_N: Tensor) -> Tensor:
    """fp32; ``weight_N`` is what a token's loss counts."""
    grad_Nv = saved.probability_Nv.mul_(weight_N[:, None])
    if grad_Nv.shape[1]:
        weight_N = weight_N * saved.is_local_N
        grad_Nv.scatter_add_(1, saved.column_N[:, None], -weight_N[:, None])
    return grad_Nv


# A head and its losses are computed in chunks of tokens: the logits of all tokens never exist.
#
# The forward pass turns a chunk's logits into their gradient at once. From that it computes the
# chunk's gradient of the hidden state and adds to the head's gradient, so nothing is computed
# twice. The backward pass needs memory of the size of the hidden state and the head, for any number
# of tokens. The idea is that of Liger's fused linear cross-entropy (Hsu et al. 2024,
# arXiv:2410.10989, section 3.2). The head's gradient is summed over chunks in fp32, because bf16
# would round it once more for each chunk.
#
# Shape suffixes: N = tokens, C = tokens of a chunk, D = width, v = this rank's part of the
# vocabulary.


def compute_in_chunks(
    head: nn.Module, losses: VocabLoss, *, tokens: int, softcap: float | None = None
) -> None:
    """Let a head with targets return the sum of its losses; without targets it returns logits.

    It stays the module that is called. Its parameters, and its tokens under tensor parallelism,
    are thereby gathered once for all chunks.

    Args:
        tokens: Tokens of one chunk.
        softcap: Logits z become softcap tanh(z / softcap) before their losses; None: they do not.
    """
    assert isinstance(head, nn.Linear)
    logits = head.forward

    def of_shares(x: Tensor, targets: Tensor) -> Tensor:
        return loss_in_chunks(
            x, head.weight, head.bias, targets, losses=losses, tokens=tokens, softcap=softcap,
            matrix_vD=matrix_of(head),
        )  # fmt: skip

    loss_sum = OnShares(head, of_shares)

    def forward(x: Tensor, targets: Tensor | None = None) -> Tensor:
        output: Tensor = logits(x) if targets is None else loss_sum(x, targets)
        return output

    head.forward = forward  # type: ignore[method-assign,assignment]


def loss_in_chunks(
    x: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor | None,
    targets: Tensor,
    *,
    losses: VocabLoss,
    tokens: int,
    softcap: float | None = None,
    matrix_vD: Tensor | None = None,
) -> Tensor:
    """Sum the losses of ``x W^T + b`` in nats, fp32; gradients are made where they are wanted.

    Args:
        x: Hidden state (..., D).
        targets: Token ids (...) or ``IGNORED``.
        tokens: Tokens of one chunk.
        matrix_vD: Replacement of the weight in products; None: itself.
    """
    x_ND, targets_N = x.flatten(0, -2), targets.flatten()
    matrix_vD = (weight_vD if matrix_vD is None else matrix_vD).detach()
    made = _Gradients(x_ND, weight_vD, bias_v, matrix_vD=matrix_vD, several=len(x_ND) > tokens)
    cast_v = None if bias_v is None else bias_v.to(matrix_vD.dtype)
    with torch.no_grad():
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for first in range(0, len(x_ND), tokens):
            x_CD, targets_C = x_ND[first : first + tokens], targets_N[first : first + tokens]
            if not made.needed:
                loss += losses(_capped(F.linear(x_CD, matrix_vD, cast_v), softcap), targets_C)
                continue
            if softcap is None:
                # handed on without a name: let go as soon as they have become probabilities
                of_chunk = losses.with_gradient(F.linear(x_CD, matrix_vD, cast_v), targets_C)
            else:
                of_chunk = _with_capped_gradient(
                    F.linear(x_CD, matrix_vD, cast_v), softcap, losses, targets_C
                )
            loss += of_chunk[0]
            grad_Cv = of_chunk[1]
            del of_chunk
            made.add(first, x_CD, grad_Cv)
            del grad_Cv  # before the next chunk's logits
    for tensor, grad in made.taken():
        loss = loss + _WithGradient.apply(tensor, grad)  # type: ignore[no-untyped-call]
    return loss


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _with_capped_gradient(
    logits_Cv: Tensor, softcap: float, losses: VocabLoss, targets_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``VocabLoss.with_gradient`` with the gradient by the logits before the cap."""
    capped_Cv = _capped(logits_Cv, softcap)
    loss, grad_Cv = losses.with_gradient(capped_Cv, targets_C)
    return loss, grad_Cv.mul_(1 - (capped_Cv / softcap).square_())


class _Gradients:
    """Gradients of a hidden state, a head and its bias, chunk by chunk. None: not wanted."""

    def __init__(
        self,
        x_ND: Tensor,
        weight_vD: Tensor,
        bias_v: Tensor | None,
        *,
        matrix_vD: Tensor,
        several: bool,
    ) -> None:
        records = torch.is_grad_enabled()
        self._x, self._weight, self._bias = (
            tensor if records and tensor is not None and tensor.requires_grad else None
            for tensor in (x_ND, weight_vD, bias_v)
        )
        self.needed = not (self._x is self._weight is self._bias is None)
        self._matrix_vD = matrix_vD
        self._grad_ND = None if self._x is None else torch.empty_like(x_ND)
        self._sum_format = torch.float32 if several else weight_vD.dtype
        self._sum_vD: Tensor | None = None
        self._sum_v: Tensor | None = None

    def add(self, first: int, x_CD: Tensor, grad_Cv: Tensor) -> None:
        """Add the gradients of a chunk that begins with token ``first``."""
        if self._grad_ND is not None:
            torch.mm(grad_Cv, self._matrix_vD, out=self._grad_ND[first : first + len(x_CD)])
        if self._weight is not None:
            if self._weight.dtype != grad_Cv.dtype:  # an fp32 weight that computes by a copy
                self._sum_vD = add_product(self._sum_vD, grad_Cv, x_CD)
            elif self._sum_vD is None:
                self._sum_vD = (grad_Cv.T @ x_CD).to(self._sum_format)
            elif self._sum_vD.dtype == grad_Cv.dtype:
                self._sum_vD.addmm_(grad_Cv.T, x_CD)  # without a product of its own
            else:
                self._sum_vD += grad_Cv.T @ x_CD
        if self._bias is not None:
            sum_v = grad_Cv.sum(dim=0, dtype=torch.float32)
            self._sum_v = sum_v if self._sum_v is None else self._sum_v.add_(sum_v)

    def taken(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor with its gradient, in its own format; they are held here no longer."""
        pairs = [
            (self._x, self._grad_ND), (self._weight, self._sum_vD), (self._bias, self._sum_v)
        ]  # fmt: skip
        self._grad_ND = self._sum_vD = self._sum_v = None
        return [
            (tensor, grad.to(tensor.dtype))
            for tensor, grad in pairs
            if tensor is not None and grad is not None
        ]


class _WithGradient(torch.autograd.Function):
    """Zero, whose gradient by a tensor is known already.

    One for each tensor: a pipeline that splits its backward pass asks for that of the hidden state
    first and for that of the head later, and each is let go when it has been asked for.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return tensor.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad: Tensor = ctx.grad
        ctx.grad = None  # used once: there is one backward pass
        return grad.mul_(grads[0]), None
