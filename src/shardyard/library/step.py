"""One step in somebody's own loop: gradients, their norm, and an evaluation, the same everywhere.

Losses are sums over what is predicted on all ranks and in all micro-batches, divided once by how
many there are. So no layout, and no split of a step into micro-batches, changes the step.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from shardyard.data.loader import IGNORED
from shardyard.errors import RequestError
from shardyard.families.config_json import CAUSAL_CLASSES
from shardyard.library.model import Sharded, sharded
from shardyard.library.model_parallel import ScriptModel
from shardyard.parallel.gradients import local_part, square_sum
from shardyard.tasks.custom import Loss
from shardyard.tasks.loss_computation import Computation
from shardyard.torch_private import foreach_div_, tree_leaves
from shardyard.train.loss_reduction import Totals, sum_over_ranks


def accumulate(model: nn.Module, batches: Sequence[Any], loss: Loss | None = None) -> Tensor:
    """Run forward and backward passes of a step's micro-batches. All ranks call it together.

    Afterwards ``.grad`` of the parameters is the gradient of the mean that is returned, with no
    division left to do.

    Args:
        batches: This rank's micro-batches, equally many on all ranks; ranks that split samples or
            the model (cp, tp, pp) get the same ones. Of a known family each is a dict of
            ``input_ids`` and ``labels``, (samples, tokens).
        loss: Of a module of one's own: (model, batch) -> (sum of losses, how many they are).

    Returns:
        Mean loss over all that was predicted in the step, on every rank; fp64, 0 without any.

    Raises:
        RequestError: Gradients of an earlier step are still there, all parameters are frozen, or
            the batches do not fit.
    """
    parts, computation, read = _ready(model, batches, loss, trains=True)
    left = next((name for name, param in parts.params.items() if param.grad is not None), None)
    if left is not None:
        raise RequestError(
            f"{left} has a gradient from before: this step's would be added to it and both divided "
            "by the tokens of this one. Call optimizer.zero_grad() after each step; for several "
            "micro-batches a step pass all of them in one call."
        )
    totals = sum_over_ranks(
        computation.backward(read), device=parts.device, statistics=computation.statistics
    )
    mean, divisor = _mean(totals)
    _divide(parts, divisor)
    totals.give_back(skipped=~torch.isfinite(mean))  # what is kept shall not become NaN
    return mean


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Any], loss: Loss | None = None) -> Tensor:
    """Mean loss over batches of all ranks, without gradients; arguments as for ``accumulate``."""
    parts, computation, read = _ready(model, batches, loss)
    was_training = model.training
    model.eval()
    part = computation.forward(read)
    model.train(was_training)
    return _mean(sum_over_ranks(part, device=parts.device))[0]


def forward_backward(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Write it for ``loss = model(**batch).loss`` and ``loss.backward()``, in any layout.

    Under pp the batches of the ranks that hold one copy of the model are its micro-batches. All
    ranks call it together; gradients are added to those that are there.

    Args:
        batch: Arguments of the model, with labels.

    Returns:
        The loss, without a graph: of this rank's batch, or of all that its group of tp, cp and pp
        reads.

    Raises:
        RequestError: The model was not wrapped, or its batches do not fit the pipeline.
    """
    parts = sharded(model)
    if parts.built_as is None:
        raise RequestError(
            f"forward_backward() is for models of shardyard.wrap(), which this "
            f"{type(model).__name__} has not been through. After parallelize() call accumulate()."
        )
    if "labels" not in batch:
        raise RequestError(f"forward_backward() was given {', '.join(batch)}: a loss needs labels.")
    if isinstance(model.forward, ScriptModel) and parts.mesh.layout.pp > 1:
        return model.forward.through_pipeline(batch, parts.params)
    loss: Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to a global norm of at most ``max_norm``. All ranks call it together.

    Returns:
        The norm before, over all parameters on all ranks; fp64, not finite if a gradient is not.

    Raises:
        RequestError: There are no gradients.
    """
    parts = sharded(model)
    trained = [param for param in parts.params.values() if param.requires_grad]
    if trained and all(param.grad is None for param in trained):
        raise RequestError(
            "no gradients to clip. Call shardyard.accumulate(model, batches) before, and "
            "optimizer.zero_grad() after the optimizer's step."
        )
    total = square_sum(parts.params, tied_across_stages=parts.reader.tied_across_stages)
    dist.all_reduce(total)
    norm = total.sqrt()
    _divide(parts, (norm / max_norm).clamp(min=1.0))
    return norm


def _ready(
    model: nn.Module, batches: Sequence[Any], loss: Loss | None, *, trains: bool = False
) -> tuple[Sharded, Computation[Any], Sequence[Any]]:
    """Reject what would hang, or train on garbage; else return the computation for the batches."""
    parts = sharded(model)
    if not parts.has_weights:
        raise RequestError(
            "the model was split on the meta device and has no weights yet. Call "
            "shardyard.fill_weights(model, folder) or load_checkpoint() first."
        )
    if not batches:
        raise RequestError("no batches. A step takes one or more of them on every rank.")
    computation, read = parts.reader.read(batches, loss)
    is_frozen = not any(param.requires_grad for param in parts.params.values())
    facts = parts.agree((len(batches), parts.mesh.data_rank, _digest(batches), is_frozen))
    if trains and all(frozen for *_, frozen in facts):
        raise RequestError(
            f"every parameter of this {type(model).__name__} is frozen (requires_grad is False), "
            "so no parameter can be trained. Leave what you want to train as it is, or use "
            "evaluate()."
        )
    numbers = [number for number, *_ in facts]
    if len(set(numbers)) > 1:
        rank = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        raise RequestError(
            f"rank {rank} has {numbers[rank]} micro-batches and rank 0 has {numbers[0]}. Ranks "
            "meet in every one, so the others would wait for ever. Give equally many; one with "
            "all labels -100 counts as zero tokens."
        )
    if (
        len({(data_rank, digest) for _, data_rank, digest, _ in facts})
        > parts.mesh.layout.data_ranks
    ):
        raise RequestError(
            "ranks that split samples or the model have read different samples. Those of one "
            "mesh.data_rank work on the same ones. Deal samples by mesh.data_rank of "
            "mesh.layout.data_ranks, not by the process's rank."
        )
    return parts, computation, read


def _digest(batches: Sequence[Any]) -> int:
    """Return a digest of the tensors in host memory: asking a device would make it wait."""
    digest = 0
    for leaf in tree_leaves([dict(b) if isinstance(b, Mapping) else b for b in batches]):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
            flat = leaf.detach().contiguous().view(-1)
            digest = zlib.crc32(flat.view(torch.uint8).numpy().data, digest)
    return digest


def _mean(totals: Totals) -> tuple[Tensor, Tensor]:
    """The mean over all ranks, and what it was divided by."""
    divisor = totals.divisor.clamp(min=1.0)
    return totals.loss_sum / divisor, divisor


@torch.no_grad()
def _divide(parts: Sharded, divisor: Tensor) -> None:
    grads = [local_part(p.grad) for p in parts.params.values() if p.grad is not None]
    if grads:  # a pipeline stage may hold nothing that is trained
        foreach_div_(grads, divisor.float())


# Gradients of the mean over all labels of a step, of a script that calls ``loss.backward()``.
#
# A script's loss is the mean over the labels of one micro-batch on one rank, and FSDP takes the
# mean of the ranks'. With c labels in each, C in all k micro-batches of all R ranks since the last
# step, each gradient is weighted by R k c / C: equal counts change nothing, and the script's own
# division by k then gives the sum over labels divided by C. When micro-batch k begins its backward
# pass, what was there is weighted anew; so ``.grad`` is right after every backward pass, for
# clipping too.

_OTHER_MEANS = ("num_items_in_batch", "shift_labels")
"""Arguments with which a script makes the loss another mean."""


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
                'gradients="exact" with output_router_logits=True: the loss then holds a part '
                "that is not a mean over labels. Set it to False."
            )
        self._params = params
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._number = 0
        model.register_forward_hook(self._computed, with_kwargs=True)

    def watch(self, optimizer: Optimizer) -> None:
        """Restart the count after each of its steps; reject steps of unweighted gradients."""
        optimizer.register_step_pre_hook(self._check)
        optimizer.register_step_post_hook(self._stepped)

    def _computed(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = getattr(output, "loss", None)
        if loss is None or not loss.requires_grad:
            return
        other = next((name for name in _OTHER_MEANS if kwargs.get(name) is not None), None)
        if other is not None:
            raise RequestError(
                f'gradients="exact" with {other}: the loss is then another mean than that of the '
                'labels. Leave it out, or use gradients="mean".'
            )
        labels_BL = kwargs["labels"]
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

    def _check(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        has_any = any(param.grad is not None for param in self._params.values())
        if has_any and not self._number:
            raise RequestError(
                f'gradients="exact", but {type(optimizer).__name__} steps gradients of a loss that '
                "is not the model's own, so how many labels it is of is not known. Call "
                'model(..., labels=labels).loss.backward(), or use gradients="mean".'
            )

    def _stepped(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        self._count = torch.zeros_like(self._count)
        self._number = 0
