"""Batch normalisation that no layout changes: over a micro-batch, and counted once a step.

What ``nn.BatchNorm`` normalises over is the micro-batch that it is given, whose samples are the
same in every layout; or it is over a whole step, of which each rank then computes its samples at
once (``model.batch_norm``). Its running statistics are not the same: they follow whatever a process
computes, one micro-batch after the other. Here a step's micro-batches are added up, over all ranks,
and the running statistics move once, by the mean and the variance of all that the step has seen.
The forward method is replaced, not the module: names in checkpoints stay.

Rows are counted on the way back, by a hook on the norm's output: a forward pass may be computed
again, and a function of autograd would make the output one that must not be changed in place, as
residual networks do.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.errors import RequestError

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

BY_MICRO_BATCH = "batch normalisation is over a micro-batch, so that another one learns otherwise"


def batch_norms_in(model: nn.Module) -> dict[str, nn.Module]:
    """The batch normalisations of a module by name; ``SyncBatchNorm`` is none of these."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KINDS)}


class BatchNorms:
    """All batch normalisations of a module: a ``Statistics`` of the step."""

    metrics: Sequence[str] = ()

    def __init__(self, model: nn.Module, *, over_step: bool = False) -> None:
        """Replace the forward methods of those that are in a module.

        Args:
            over_step: Whether they normalise over the samples of all ranks, which all compute one
                micro-batch a step; else over each micro-batch.
        """
        self.over_step = over_step
        self.is_weightless = False
        """Whether the micro-batch that is computed counts for nothing: it is there only so that
        ranks meet. Its one sample has no variance; running statistics take its place."""
        self.counts: int | Tensor = 1
        """Of the losses of the micro-batch whose backward pass comes next; 0: nothing counts."""
        self._norms = [_Norm(name, norm, self) for name, norm in batch_norms_in(model).items()]

    @property
    def size(self) -> int:
        """Numbers in a row: of each norm a count, and two for each of its features."""
        return sum(norm.size for norm in self._norms)

    def take(self, device: torch.device) -> Tensor:
        """What this rank has seen since the last step, fp64."""
        rows = [norm.take(device) for norm in self._norms]
        return torch.cat(rows)

    def give_back(self, summed: Tensor, *, skipped: Tensor) -> Sequence[Tensor]:
        """Let running statistics follow what all ranks have seen; of a skipped step nothing."""
        sizes = [norm.size for norm in self._norms]
        for norm, row in zip(self._norms, torch.split(summed, sizes), strict=True):
            norm.follow(row, skipped)
        return ()


def _no_variance(name: str) -> RequestError:
    """Of a norm that is given one number of each feature. Only its input tells: an image has more.

    The first step of a run meets it, before anything is learnt.
    """
    return RequestError(
        f"{name}, a batch normalisation, is given a micro-batch of one sample and with it one "
        "number of each feature, which has no variance to divide by. Let every micro-batch have "
        "two samples: choose optim.micro_batch above 1 and so that no single sample of "
        "optim.global_batch (in an evaluation: of the held-out ones) is left over for the last; or "
        "use GroupNorm or LayerNorm there."
    )


class _SumOverRanks(torch.autograd.Function):
    """A sum over all ranks, and of its gradients: each loss depends on what all ranks have."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return _summed(grad)


def _summed(x: Tensor) -> Tensor:
    total = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


class _Norm:
    """One batch normalisation, and what it has seen: count, sums, sums of squares, (1 + 2C)."""

    def __init__(self, name: str, norm: nn.Module, norms: BatchNorms) -> None:
        assert isinstance(norm, KINDS)
        self._name = name
        self._norm = norm
        self._norms = norms
        self._as_it_is = norm.forward
        self._seen: Tensor | None = None
        self.size = 1 + 2 * norm.num_features
        norm.forward = self._forward  # type: ignore[method-assign,assignment]

    def _forward(self, x: Tensor) -> Tensor:
        norm = self._norm
        is_step = norm.training and torch.is_grad_enabled() and norm.running_mean is not None
        if is_step and self._norms.over_step:
            return self._over_step(x)
        if self._norms.is_weightless:
            return F.batch_norm(x, *self._running(x), *self._affine(), eps=norm.eps)
        if x.numel() == norm.num_features and (norm.training or norm.running_mean is None):
            raise _no_variance(self._name)
        if not norm.training and norm.running_mean is not None:
            return F.batch_norm(x, *self._running(x), *self._affine(), eps=norm.eps)
        if not is_step:  # a call of a script's own
            return self._as_it_is(x)
        # with a momentum of 1 torch leaves there the statistics of the batch itself
        mean_C, var_C = torch.zeros(2, norm.num_features, device=x.device).unbind()
        y = F.batch_norm(
            x, mean_C, var_C, *self._affine(), training=True, momentum=1.0, eps=norm.eps
        )
        count = y.numel() // norm.num_features
        self._count(y, mean_C.double(), var_C.double() * ((count - 1) / count))
        return y

    def _over_step(self, x: Tensor) -> Tensor:
        """Normalised over what all ranks have; all call it together.

        The mean is summed before the squares about it: squares of what is far from 0 lose digits.
        """
        norm, count = self._norm, x.numel() // self._norm.num_features
        others = [dim for dim in range(x.dim()) if dim != 1]
        as_channel = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        has = 0.0 if self._norms.is_weightless else 1.0
        wide = x.float()
        sums = torch.cat([wide.new_full((1,), has * count), has * wide.sum(others)])
        total, sums_C = torch.split(_SumOverRanks.apply(sums), [1, norm.num_features])  # type: ignore[no-untyped-call]
        centred = wide - (sums_C / total).view(as_channel)
        squares_C = _SumOverRanks.apply(has * centred.square().sum(others))  # type: ignore[no-untyped-call]
        scale_C = torch.rsqrt(squares_C / total + norm.eps)
        if norm.weight is not None:
            scale_C = scale_C * norm.weight.float()
        y = centred * scale_C.view(as_channel)
        if norm.bias is not None:
            y = y + norm.bias.float().view(as_channel)
        y = y.to(x.dtype)
        own = wide.detach().double()  # the step's are the sum of these
        self._count(y, own.mean(others), own.var(others, correction=0))
        return y

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias in fp32, as statistics are: torch takes no others beside 16-bit input."""
        weight_C, bias_C = self._norm.weight, self._norm.bias
        return (
            None if weight_C is None else weight_C.float(),
            None if bias_C is None else bias_C.float(),
        )

    def _running(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean_C, var_C = self._norm.running_mean, self._norm.running_var
        if mean_C is None or var_C is None:
            zeros_C = torch.zeros(self._norm.num_features, device=x.device)
            return zeros_C, torch.ones_like(zeros_C)
        return mean_C, var_C

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(self, y: Tensor, mean_C: Tensor, spread_C: Tensor) -> None:
        """Count what was normalised once its gradient passes; at once if there will be none.

        Args:
            spread_C: Mean of the squares about the mean, fp64.
        """
        count = y.numel() // self._norm.num_features
        row = torch.cat(
            [mean_C.new_full((1,), count), count * mean_C, count * (spread_C + mean_C.square())]
        )
        if y.requires_grad:
            y.register_hook(lambda _: self._add(row))  # type: ignore[no-untyped-call]
        else:
            self._add(row)

    def _add(self, row: Tensor) -> None:
        counts = torch.as_tensor(self._norms.counts, device=row.device) > 0
        row = torch.where(counts, row, 0.0)
        self._seen = row if self._seen is None else self._seen + row

    def take(self, device: torch.device) -> Tensor:
        """What was seen, which then begins anew."""
        seen, self._seen = self._seen, None
        return torch.zeros(self.size, dtype=torch.float64, device=device) if seen is None else seen

    @torch.no_grad()
    def follow(self, row: Tensor, skipped: Tensor) -> None:
        """Move the running statistics by the mean and the unbiased variance of a step."""
        norm = self._norm
        if norm.running_mean is None or norm.running_var is None:
            return
        assert norm.num_batches_tracked is not None
        count, sums_C, squares_C = torch.split(row, [1, norm.num_features, norm.num_features])
        is_kept = (count > 0) & ~skipped
        norm.num_batches_tracked += is_kept[0]
        share: float | Tensor | None = norm.momentum
        if share is None:  # the mean over all steps
            share = 1.0 / norm.num_batches_tracked.clamp(min=1).double()
        mean_C = sums_C / count
        var_C = (squares_C - count * mean_C.square()) / (count - 1.0)
        for running_C, now_C in ((norm.running_mean, mean_C), (norm.running_var, var_C)):
            moved_C = running_C + share * (now_C - running_C)
            running_C.copy_(torch.where(is_kept, moved_C, running_C.double()))
