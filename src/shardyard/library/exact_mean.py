"""Gradients of the mean over all labels of a step, of a script that calls ``loss.backward()``.

A script's loss is the mean over the labels of one micro-batch on one rank, and FSDP takes the mean
of the ranks'. With c labels in each, C in all k micro-batches of all R ranks since the last step,
each gradient is weighted by R k c / C: equal counts change nothing, and the script's own division
by k then gives the sum over labels divided by C. When micro-batch k begins its backward pass, what
was there is weighted anew; so ``.grad`` is right after every backward pass, for clipping too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from shardyard.data.micro_batch import IGNORED
from shardyard.errors import RequestError
from shardyard.families.config_json import CAUSAL_CLASSES
from shardyard.parallel.gradients import local_part

_OTHER_MEANS = ("num_items_in_batch", "shift_labels")
"""What a script may give so that the loss is another mean."""


class ExactMean:
    """Counts labels in a model's forward passes and weights gradients in its backward passes."""

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], *, device: torch.device
    ) -> None:
        name = type(model).__name__
        self._is_causal = name.endswith(CAUSAL_CLASSES)
        if not isinstance(model, PreTrainedModel) or not (
            self._is_causal or name.endswith("ForMaskedLM")
        ):
            raise RequestError(
                f'gradients="exact" divides by the labels of a step, and what a {name} predicts '
                'is not known. Use gradients="mean", or shardyard.parallelize() with accumulate(), '
                "whose loss function says how many there are."
            )
        if getattr(model.config, "output_router_logits", False):
            raise RequestError(
                'gradients="exact" with output_router_logits=True: the loss then holds a part that '
                "is no mean over labels. Set it to False."
            )
        self._params = params
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._number = 0
        model.register_forward_hook(self._computed, with_kwargs=True)

    def watch(self, optimizer: Optimizer) -> None:
        """Begin anew after each of its steps; refuse one of gradients that were not weighted."""
        optimizer.register_step_pre_hook(self._check)
        optimizer.register_step_post_hook(self._stepped)

    def _computed(self, _model: nn.Module, _args: Any, given: dict[str, Any], output: Any) -> None:
        loss = getattr(output, "loss", None)
        if loss is None or not loss.requires_grad:
            return
        other = next((name for name in _OTHER_MEANS if given.get(name) is not None), None)
        if other is not None:
            raise RequestError(
                f'gradients="exact" with {other}: the loss is then another mean than that of the '
                'labels. Leave it out, or use gradients="mean".'
            )
        labels_BL = given["labels"]
        if self._is_causal:  # the first token of a sample is not predicted
            labels_BL = labels_BL[:, 1:]
        count = (labels_BL != IGNORED).sum().double().to(self._count.device)
        total = count.clone()
        dist.all_reduce(total)
        loss.register_hook(partial(self._weight, count, total))

    @torch.no_grad()
    def _weight(self, count: Tensor, total: Tensor, grad: Tensor) -> Tensor:
        grads = [local_part(p.grad) for p in self._params.values() if p.grad is not None]
        if not grads:  # zero_grad() without a step
            self._forget()
        before, earlier = self._count.clamp(min=1.0), self._number
        self._count = self._count + total
        self._number += 1
        now = self._count.clamp(min=1.0)
        if earlier:
            again = self._number / now * before / earlier
            for held in grads:
                held.mul_(again.to(held.dtype))
        weight = dist.get_world_size() * self._number * count / now
        return grad * weight.to(grad.dtype)

    def _check(self, optimizer: Optimizer, _args: Any, _given: Any) -> None:
        has_any = any(param.grad is not None for param in self._params.values())
        if has_any and not self._number:
            raise RequestError(
                f'gradients="exact", but {type(optimizer).__name__} steps gradients of a loss that '
                "is not the model's own, so how many labels it is of is not known. Call "
                'model(..., labels=labels).loss.backward(), or use gradients="mean".'
            )

    def _stepped(self, _optimizer: Optimizer, _args: Any, _given: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        self._count = torch.zeros_like(self._count)
        self._number = 0
