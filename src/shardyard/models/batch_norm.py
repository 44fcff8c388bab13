"""Batch normalisation that no layout changes: over a micro-batch, and counted once a step.

``nn.BatchNorm`` normalises over its micro-batch, whose samples are the same in every
layout. With ``model.batch_norm``, it can normalise over a whole step, of which each rank
then computes its samples at once. Its running statistics differ between layouts: they
follow every micro-batch that a process computes. Here a step's micro-batches are added up
over all ranks. The running statistics move once, by the mean and the variance of all
samples of the step. The forward method is replaced, not the module: names in checkpoints
stay. The statistics of all norms are added up and passed to their running statistics at
once. Each by itself would take as long as a small network.

A hook on the norm's output counts rows in the backward pass, because a forward pass may be
recomputed. An autograd function would forbid in-place changes of the output, which residual
networks make.

Shape suffixes in this file:
    N = norms, of which each has C features
    F = features of all of them
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.torch_private import foreach_add_, foreach_copy_, foreach_mul_

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

BY_MICRO_BATCH = "batch normalisation is over a micro-batch, so that another one learns otherwise"


def batch_norms_in(model: nn.Module) -> dict[str, nn.Module]:
    """The batch normalisations of a module by name; ``SyncBatchNorm`` is none of these."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KINDS)}


class _Seen(NamedTuple):
    """Statistics of one norm's input in one micro-batch."""

    numbers: int
    """Count of numbers of each feature."""
    moments_2C: Tensor
    """Mean and variance."""
    of_variance: float
    """Factor from this variance to the mean of the squares about the mean."""


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
        """Whether the micro-batch has no weight and only lets ranks meet.

        Its one sample has no variance; running statistics take its place.
        """
        self.counts: int | Tensor = 1
        """Count of losses of the micro-batch whose backward pass comes next; 0: none counts."""
        found = batch_norms_in(model)
        for name, norm in found.items():
            _Norm(name, norm, self)
        self._norms: list[Any] = [norm for norm in found.values() if norm.running_mean is not None]
        """Norms with running statistics."""
        self._features: list[int] = [norm.num_features for norm in self._norms]
        self._index_of = {norm: place for place, norm in enumerate(self._norms)}
        self._seen: dict[int, _Seen] = {}
        """Statistics of one micro-batch, by place of the norm."""
        self._seen_counts: int | Tensor = 1
        self._row: Tensor | None = None
        """Sums over the earlier micro-batches: a count per norm, sums and squares per feature."""

    @property
    def size(self) -> int:
        """Numbers in a row: of each norm a count, and two for each of its features."""
        return len(self._norms) + 2 * sum(self._features)

    def saw(self, norm: nn.Module, seen: _Seen) -> None:
        """Count what a norm was given, as the micro-batch whose backward pass this is counts."""
        place = self._index_of[norm]
        if place in self._seen or self.counts is not self._seen_counts:  # another micro-batch
            self._add()
        self._seen[place], self._seen_counts = seen, self.counts

    def take(self, device: torch.device) -> Tensor:
        """Return what this rank has seen since the last step, fp64."""
        self._add()
        row, self._row = self._row, None
        return torch.zeros(self.size, dtype=torch.float64, device=device) if row is None else row

    @torch.no_grad()
    def _add(self) -> None:
        """Add what one micro-batch has shown to the row."""
        seen, self._seen = self._seen, {}
        if not seen or (isinstance(self._seen_counts, int) and not self._seen_counts):
            return
        nothing = next(iter(seen.values())).moments_2C
        by_norm = [
            seen.get(place) or _Seen(0, nothing.new_zeros(2, features), 0.0)
            for place, features in enumerate(self._features)
        ]
        counts = [each.numbers for each in by_norm]
        mean_F, square_F = torch.cat([each.moments_2C for each in by_norm], dim=1).double()
        foreach_mul_(self._by_norm(square_F), [each.of_variance for each in by_norm])
        square_F += mean_F.square()
        counts_N = mean_F.new_zeros(len(counts))
        # numbers of the host are arguments of kernels: a tensor of them would be copied
        foreach_add_(list(counts_N.unbind()), counts)
        for sums_F in (mean_F, square_F):
            foreach_mul_(self._by_norm(sums_F), counts)
        row = torch.cat([counts_N, mean_F, square_F])
        if isinstance(self._seen_counts, Tensor):
            row = torch.where(self._seen_counts > 0, row, 0.0)
        self._row = row if self._row is None else self._row + row

    @torch.no_grad()
    def give_back(self, summed: Tensor, *, skipped: Tensor) -> Sequence[Tensor]:
        """Update running statistics from all ranks, by the step's mean and unbiased variance.

        A skipped step changes none.
        """
        if not self._norms:
            return ()
        total = sum(self._features)
        counts_N, sums_F, squares_F = torch.split(summed, [len(self._norms), total, total])
        is_kept_N = (counts_N > 0) & ~skipped
        foreach_add_(
            [norm.num_batches_tracked for norm in self._norms], list(is_kept_N.long().unbind())
        )
        counts_F, is_kept_F = self._of_features(counts_N), self._of_features(is_kept_N)
        mean_F = sums_F / counts_F
        var_F = (squares_F - counts_F * mean_F.square()) / (counts_F - 1.0)
        for now_F, running in (
            (mean_F, [norm.running_mean for norm in self._norms]),
            (var_F, [norm.running_var for norm in self._norms]),
        ):
            before_F = torch.cat(running).double()
            step_F = now_F - before_F
            self._times_share(step_F)
            moved_F = torch.where(is_kept_F, before_F + step_F, before_F)
            foreach_copy_(running, self._by_norm(moved_F))
        return ()

    def _times_share(self, step_F: Tensor) -> None:
        """Multiply each norm's part, in place, by how far its running statistics move."""
        parts = self._by_norm(step_F)
        momenta = [norm.momentum for norm in self._norms]
        foreach_mul_(parts, [1.0 if momentum is None else momentum for momentum in momenta])
        for norm, part, momentum in zip(self._norms, parts, momenta, strict=True):
            if momentum is None:  # the mean over all steps
                part /= norm.num_batches_tracked.clamp(min=1)

    def _by_norm(self, each_F: Tensor) -> list[Tensor]:
        return list(torch.split(each_F, self._features))

    def _of_features(self, each_N: Tensor) -> Tensor:
        """Repeat the value of each norm for each of its features."""
        parts = zip(each_N.unbind(), self._features, strict=True)
        return torch.cat([each.expand(features) for each, features in parts])


def _no_variance(name: str) -> RequestError:
    """Return the error for a norm whose input has one number of each feature.

    Only its input shows this: an image has more. The error comes in the first step of a run,
    before anything is learnt.
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
    """The forward method of one batch normalisation."""

    def __init__(self, name: str, norm: nn.Module, norms: BatchNorms) -> None:
        assert isinstance(norm, KINDS)
        self._name = name
        self._norm = norm
        self._norms = norms
        self._as_it_is = norm.forward
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
        moments_2C = torch.zeros(2, norm.num_features, device=x.device)
        mean_C, var_C = moments_2C.unbind()
        y = F.batch_norm(
            x, mean_C, var_C, *self._affine(), training=True, momentum=1.0, eps=norm.eps
        )
        count = y.numel() // norm.num_features
        self._count(y, _Seen(count, moments_2C, (count - 1) / count))
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
        moments_2C = torch.stack([own.mean(others), own.var(others, correction=0)])
        self._count(y, _Seen(count, moments_2C, 1.0))
        return y

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Get weight and bias in fp32, like statistics: with 16-bit input torch takes no others."""
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
    def _count(self, y: Tensor, seen: _Seen) -> None:
        """Count what was normalised once its gradient passes; at once if there will be none."""
        if y.requires_grad:
            y.register_hook(lambda _: self._norms.saw(self._norm, seen))  # type: ignore[no-untyped-call]
        else:
            self._norms.saw(self._norm, seen)
