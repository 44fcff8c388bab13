"""A head and its losses in chunks of tokens, so that the logits of all tokens never exist.

A chunk's logits become their gradient at once, in the forward pass, and that becomes the chunk's
gradient of the hidden state and a summand of the head's: nothing is computed twice. What waits for
the backward pass is as large as the hidden state and the head, however many tokens there are. It is
the idea of Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989, section 3.2). The
head's gradient is summed over chunks in fp32: in bf16 each chunk would round it once more.

Shape suffixes: N = tokens, C = those of a chunk, D = width, v = this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.parallel.copied_products import add_product, matrix_of
from shardyard.parallel.tensor import OnShares
from shardyard.parallel.vocab_loss import VocabLoss


def compute_in_chunks(
    head: nn.Module, losses: VocabLoss, *, tokens: int, softcap: float | None = None
) -> None:
    """Let a head that is told targets return the sum of its losses; without it returns logits.

    It stays the module that is called, so that its parameters are gathered, and its tokens under
    tensor parallelism, once for all chunks.

    Args:
        tokens: Of one chunk.
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
        found: Tensor = logits(x) if targets is None else loss_sum(x, targets)
        return found

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
    """Sum of the losses of ``x W^T + b`` in nats, fp32; gradients are made where they are wanted.

    Args:
        x: Hidden state (..., D).
        targets: Token ids (...) or ``IGNORED``.
        tokens: Of one chunk.
        matrix_vD: What stands for the weight in products; None: itself.
    """
    x_ND, targets_N = x.flatten(0, -2), targets.flatten()
    matrix_vD = (weight_vD if matrix_vD is None else matrix_vD).detach()
    made = _Gradients(x_ND, weight_vD, bias_v, matrix_vD=matrix_vD, several=len(x_ND) > tokens)
    cast_v = None if bias_v is None else bias_v.to(matrix_vD.dtype)
    with torch.no_grad():
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for first in range(0, len(x_ND), tokens):
            x_CD, targets_C = x_ND[first : first + tokens], targets_N[first : first + tokens]
            if not made.wanted:
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
    """As ``VocabLoss.with_gradient``, the gradient by the logits before the cap."""
    capped_Cv = _capped(logits_Cv, softcap)
    loss, grad_Cv = losses.with_gradient(capped_Cv, targets_C)
    return loss, grad_Cv.mul_(1 - (capped_Cv / softcap).square_())


class _Gradients:
    """Of a hidden state, a head and its bias, chunk by chunk; None: not wanted."""

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
        self.wanted = not (self._x is self._weight is self._bias is None)
        self._matrix_vD = matrix_vD
        self._grad_ND = None if self._x is None else torch.empty_like(x_ND)
        self._sum_format = torch.float32 if several else weight_vD.dtype
        self._sum_vD: Tensor | None = None
        self._sum_v: Tensor | None = None

    def add(self, first: int, x_CD: Tensor, grad_Cv: Tensor) -> None:
        """Those of a chunk that begins with token ``first``."""
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
