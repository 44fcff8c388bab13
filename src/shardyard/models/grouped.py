"""One matrix product for each expert over rows that are sorted by expert.

Operators of our own around torch's grouped product: it refuses, in torch 2.13, matrices whose rows
are no multiple of 16 bytes, empty ones, and fake ones unless they are bf16. Those few go expert by
expert here, and nobody else needs to know.

Shape suffixes: N = rows, E = experts, I = width in, O = width out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
