"""The user's own loss and metrics, called with what a model returns for a micro-batch.

Shape suffixes: B = samples in a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardyard.own_code import OwnFunction

SUM, COUNT = ".sum", ".count"
"""Ends of the names under which a metric's totals travel with the loss."""


@dataclass(frozen=True, kw_only=True)
class OwnObjective:
    """Loss and metrics of the user's own."""

    loss: OwnFunction | None = None
    """None: the task's."""
    metrics: Mapping[str, OwnFunction] = field(default_factory=dict)
    """By their names in evaluations."""

    def loss_sum(self, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the losses of a micro-batch, with its gradient, and their number, fp64.

        Raises:
            RequestError: The function failed, or returned something else.
        """
        assert self.loss is not None
        answer = self.loss(outputs, batch)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self.loss.returned(answer)
        loss_sum, count = answer
        if not isinstance(loss_sum, Tensor) or loss_sum.dim() or not loss_sum.is_floating_point():
            raise self.loss.returned(answer, "the first is no tensor of one number")
        if torch.is_grad_enabled() and not loss_sum.requires_grad:
            raise self.loss.returned(answer, "the loss does not depend on the outputs by autograd")
        try:
            number = torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self.loss.returned(answer, "the second is no number") from error
        if number.dim():
            raise self.loss.returned(answer, "the second is no number")
        return loss_sum, number.detach()

    def zeros(self, device: torch.device) -> dict[str, Tensor]:
        """Totals of no sample, by the names of ``metric_sums``."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return {f"{name}{end}": zero for name in self.metrics for end in (SUM, COUNT)}

    @torch.no_grad()
    def metric_sums(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Totals of each metric over the samples of a micro-batch, fp64.

        Raises:
            RequestError: A function failed, or returned something else.
        """
        found = {}
        for name, metric in self.metrics.items():
            answer = metric(outputs, batch)
            is_pair = isinstance(answer, tuple) and len(answer) == 2
            sums_B: Any = answer[0] if is_pair else answer
            counts_B: Any = answer[1] if is_pair else None
            if counts_B is None and isinstance(sums_B, Tensor):
                counts_B = torch.ones_like(sums_B)
            for each in (sums_B, counts_B):
                samples = _samples(outputs, batch)
                if not isinstance(each, Tensor) or each.shape != (samples,):
                    raise metric.returned(answer, f"the batch has {samples} samples")
            found[f"{name}{SUM}"] = sums_B.double().sum()
            found[f"{name}{COUNT}"] = counts_B.double().sum()
        return found

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Each metric of an evaluation, from totals of all ranks: one division; NaN of none."""
        return {
            name: (sums[f"{name}{SUM}"] / sums[f"{name}{COUNT}"]).item()
            for name in self.metrics
            if f"{name}{SUM}" in sums
        }


NO_OBJECTIVE = OwnObjective()


def _samples(outputs: Any, batch: Mapping[str, Tensor]) -> int:
    """Rows of the outputs, or of the batch where the outputs are no tensor."""
    if isinstance(outputs, Tensor):
        return outputs.shape[0]
    return next(iter(batch.values())).shape[0]
