"""Ranks that hold one copy of a model together: what they gather of batches, and give back.

Each reads rows of its own. Joined rows are rank by rank, (pp, cp, tp) in the order of the
mesh. Each rank has as many of them as the one with most.

Shape suffixes: B = joined rows, b = rows of one rank, L = tokens of a row, l = those that
this rank computes, V = vocabulary, v = this rank's part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardyard.data.loader import IGNORED
from shardyard.errors import RequestError
from shardyard.parallel.collectives import all_gather, exchange
from shardyard.parallel.mesh import Mesh

_PADDING = {"labels": IGNORED}
"""Field -> what is behind its end; of the others 0."""


@dataclass(frozen=True, kw_only=True)
class JoinedBatch:
    """The rows of all ranks of a group."""

    fields: Mapping[str, Tensor]
    """(B, L) each, int64."""
    rows: int
    """Number of rows that this rank read."""
    tokens: int
    """Number of tokens in each of them, before padding."""


class ModelGroup:
    """Ranks that differ only in tp, cp and pp."""

    def __init__(self, mesh: Mesh, *, multiple: int) -> None:
        """All ranks make theirs together.

        Args:
            multiple: Of tokens, to which rows are padded.
        """
        self._layout = mesh.layout
        self._axes = [axis for axis in ("tp", "cp", "pp") if getattr(mesh.layout, axis) > 1]
        self._groups = {axis: mesh.group(axis) for axis in self._axes}
        self._multiple = multiple
        self._control: dist.ProcessGroup | None = None
        if self._axes:
            self._control = _group_of(mesh.data_rank)

    def join(
        self,
        batch: Mapping[str, Tensor],
        *,
        device: torch.device,
        at_least: tuple[int, int] = (0, 0),
    ) -> JoinedBatch:
        """The batches of all ranks of the group, on each of them.

        Args:
            at_least: Rows of a rank, and tokens of a row, to which they are padded.
        """
        batch = {name: each.to(device) for name, each in batch.items()}
        rows, tokens = next(iter(batch.values())).shape
        names = tuple(sorted(batch))
        wrong = {name: tuple(each.shape) for name, each in batch.items()}
        if len(set(wrong.values())) > 1:
            raise RequestError(f"a batch has {wrong}. All must be (samples, tokens), alike.")
        if self._control is None:
            return JoinedBatch(fields=batch, rows=rows, tokens=tokens)
        by_rank: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(by_rank, (names, rows, tokens), group=self._control)
        if len({name for name, *_ in by_rank}) > 1:
            raise RequestError(
                f"ranks that split the model call it with different arguments: {by_rank}. All call "
                "it alike, with samples of their own."
            )
        most = max(at_least[0], *(rows for _, rows, _ in by_rank))
        length = max(at_least[1], *(tokens for *_, tokens in by_rank))
        length += -length % self._multiple
        if "attention_mask" not in names and {length} != {tokens for *_, tokens in by_rank}:
            batch["attention_mask"] = torch.ones_like(next(iter(batch.values())))
            names = (*names, "attention_mask")
        stacked = torch.stack(
            [_padded(batch[name], most, length, _PADDING.get(name, 0)) for name in names], dim=1
        )
        for axis in self._axes:
            stacked = all_gather(stacked, 0, self._groups[axis])
        fields = dict(zip(names, stacked.unbind(dim=1), strict=True))
        return JoinedBatch(fields=fields, rows=rows, tokens=tokens)

    def mean_loss(self, loss_sum: Tensor, divisor: Tensor) -> Tensor:
        """The group's mean of this rank's sum of losses, on each of its ranks.

        Its gradient is divided by the ranks that read other samples: summed over them it is that
        of their mean.
        """
        parts = [self._groups[axis] for axis in ("cp", "pp") if axis in self._groups]
        mean: Tensor = _MeanLoss.apply(  # type: ignore[no-untyped-call]
            loss_sum, divisor.clamp(min=1), parts, self._layout.data_ranks
        )
        return mean

    def own_logits(
        self, logits_Blv: Tensor, joined: JoinedBatch, tokens_l: Tensor | None, *, vocabulary: int
    ) -> Tensor:
        """Logits (b, L, V) of this rank's rows, as long as it gave them.

        A gradient of theirs is divided by all ranks, each of which makes a loss of its own rows.
        """
        tp, cp = self._layout.tp, self._layout.cp
        logits = divided_gradient(logits_Blv, self._layout.data_ranks * tp * cp)
        x_CTblv = torch.unflatten(logits, 0, (cp, tp, -1))
        if tp > 1:
            width = -(-vocabulary // tp)
            x_CTblv = F.pad(x_CTblv, (0, width - x_CTblv.shape[-1]))
            x_CTblv = exchange(x_CTblv, 1, 4, self._groups["tp"])[..., :vocabulary]
        if cp > 1:
            assert tokens_l is not None
            order_L = torch.argsort(all_gather(tokens_l, 0, self._groups["cp"]))
            x_CTblv = exchange(x_CTblv, 0, 3, self._groups["cp"])[..., order_L, :]
        own_bLV: Tensor = x_CTblv[0, 0, : joined.rows, : joined.tokens]
        return own_bLV


def group_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks. All ranks call it together."""
    return _group_of(tuple(dist.get_process_group_ranks(group)))


def divided_gradient(x: Tensor, divisor: float) -> Tensor:
    """The same tensor, whose gradient is divided."""
    if divisor == 1 or not x.requires_grad:
        return x
    same: Tensor = _Divided.apply(x, divisor)  # type: ignore[no-untyped-call]
    return same


def _group_of(key: Any) -> dist.ProcessGroup:
    """A gloo group of the ranks with one key. All ranks call it together."""
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, key)
    own_group: dist.ProcessGroup | None = None
    for each in sorted(set(keys)):
        ranks = [rank for rank, other in enumerate(keys) if other == each]
        group = dist.new_group(ranks, backend="gloo")
        if each == key:
            own_group = group
    assert own_group is not None
    return own_group


def _padded(x_bL: Tensor, rows: int, tokens: int, value: int) -> Tensor:
    more = (0, tokens - x_bL.shape[1], 0, rows - x_bL.shape[0])
    return F.pad(x_bL, more, value=value)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss_sum: Tensor, divisor: Tensor, parts: Sequence[dist.ProcessGroup], ranks: int
    ) -> Tensor:
        ctx.save_for_backward(divisor)
        ctx.ranks = ranks
        total = loss_sum.detach().clone()
        for group in parts:
            dist.all_reduce(total, group=group)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (divisor,) = ctx.saved_tensors
        return grads[0] / (divisor * ctx.ranks), None, None, None


class _Divided(torch.autograd.Function):
    """The same, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None
