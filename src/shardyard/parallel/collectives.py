"""Collectives that a gradient passes through, for activations split over ranks.

Each is the transpose of its partner, so that a sum over ranks of local losses has the gradient that
one process would compute: an activation that every rank of a group uses has its gradients summed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these functions and warns at every use of an older name.
_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
_ALL_GATHER_INTO = "all_gather_single" if _HAS_NEW_NAMES else "all_gather_into_tensor"
_REDUCE_SCATTER_INTO = "reduce_scatter_single" if _HAS_NEW_NAMES else "reduce_scatter_tensor"


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Pieces of all ranks joined along ``dim``; the gradient is summed and split again."""
    if dist.get_world_size(group) == 1:
        return x
    gathered: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return gathered


def gather_vocabulary(x_v: Tensor, group: dist.ProcessGroup | None, *, size: int) -> Tensor:
    """Logits (..., V) from each rank's part (..., v), for ranks that all compute the same of them.

    The gradient of a part is that of its place: no rank adds what another computes alike.

    Args:
        group: Ranks that split the vocabulary in ranges of equal size, the last may be shorter;
            None: ``x_v`` is whole.
        size: V.
    """
    if group is None or dist.get_world_size(group) == 1:
        return x_v
    gathered: Tensor = _GatherVocabulary.apply(x_v, group, size)  # type: ignore[no-untyped-call]
    return gathered


def sum_and_split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, of which each keeps its piece along ``dim``; the gradient is gathered."""
    if dist.get_world_size(group) == 1:
        return x
    piece: Tensor = _SumAndSplit.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return piece


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, whole on each; so is the gradient, as every rank has used the sum."""
    if dist.get_world_size(group) == 1:
        return x
    summed: Tensor = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


def exchange(x: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: split along one dimension, join what comes back along another."""
    if dist.get_world_size(group) == 1:
        return x
    exchanged: Tensor = _Exchange.apply(x, split_dim, join_dim, group)  # type: ignore[no-untyped-call]
    return exchanged


def exchange_rows(
    x_ND: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """All-to-all of unequally many rows: the first ``send[0]`` go to rank 0 of the group, ...

    Args:
        receive: Rows that come from each rank; it sends as many.
    """
    received: Tensor = _ExchangeRows.apply(x_ND, send, receive, group)  # type: ignore[no-untyped-call]
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_v: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ranks = dist.get_world_size(group)
        each = -(-size // ranks)
        ctx.first, ctx.length = dist.get_rank(group) * each, x_v.shape[-1]
        padded = torch.nn.functional.pad(x_v, (0, each - x_v.shape[-1]))
        return all_gather(padded, x_v.dim() - 1, group)[..., :size]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, ctx.first, ctx.length).contiguous(), None, None


class _SumAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.group), None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dims, ctx.group = (split_dim, join_dim), group
        return _all_to_all(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        return _all_to_all(grads[0], join_dim, split_dim, ctx.group), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all_rows(x_ND, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_rows(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all_rows(
    x_ND: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    received = x_ND.new_empty(sum(receive), x_ND.shape[1])
    dist.all_to_all_single(received, x_ND.contiguous(), list(receive), list(send), group=group)
    return received


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Pieces of all ranks joined along ``dim``; no gradient passes."""
    size = dist.get_world_size(group)
    pieces = x.new_empty((size, *x.shape))
    all_gather_into(pieces.view(-1), x.contiguous().view(-1), group)
    return _join(pieces, dim)


def all_gather_into(
    output: Tensor, piece: Tensor, group: dist.ProcessGroup | None, *, is_async: bool = False
) -> dist.Work | None:
    """Flat pieces of all ranks, one behind the other; returns what to wait for, if anything."""
    work: dist.Work | None = getattr(dist, _ALL_GATHER_INTO)(
        output, piece, group=group, async_op=is_async
    )
    return work


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, of which each keeps its piece along ``dim``; no gradient passes."""
    pieces = _split(x, dim, dist.get_world_size(group))
    mine = torch.empty_like(pieces[0])
    reduce_scatter_into(mine.view(-1), pieces.view(-1), group)
    return mine


def reduce_scatter_into(output: Tensor, pieces: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum flat tensors over ranks, of which each keeps its piece."""
    getattr(dist, _REDUCE_SCATTER_INTO)(output, pieces, group=group)


def _all_to_all(x: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
    pieces = _split(x, split_dim, dist.get_world_size(group))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received.view(-1), pieces.view(-1), group=group)
    return _join(received, join_dim)


def _split(x: Tensor, dim: int, pieces: int) -> Tensor:
    """(..., P * n, ...) -> contiguous (P, ..., n, ...)."""
    shape = (*x.shape[:dim], pieces, -1, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0).contiguous()


def _join(pieces: Tensor, dim: int) -> Tensor:
    """(P, ..., n, ...) -> (..., P * n, ...)."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)
