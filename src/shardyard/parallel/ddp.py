"""Replication without sharding: parameters that all ranks hold whole, in the computing format.

``fully_shard`` over one shard copies every parameter before a step, and every gradient
twice before it is summed. Here parameters are plain tensors that stay where they are. In
the backward pass of a step's last micro-batch, a bucket of gradients is copied once, into
one buffer. It is summed over ranks as soon as all its gradients are there; afterwards they
are views of the sum. A single rank copies none.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardyard.config.schema.recipe import Recipe
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.uneven_gradients import uneven_gradients_of
from shardyard.torch_private import foreach_copy_, tree_map

BUCKET_BYTES = 25 * 2**20
"""Summed at once, as in torch's DistributedDataParallel: few sums, and the first one early."""


def is_replicated(model: nn.Module, mesh: Mesh, recipe: Recipe) -> bool:
    """Whether every rank holds a module as it computes: no axis splits it, no format is another."""
    precision = recipe.precision
    return (
        mesh.layout.dp_replicate == mesh.layout.world_size
        and {precision.compute, precision.reduce, precision.output} == {"fp32"}
        and recipe.memory.offload != "params"
        and all(p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters())
    )


def hold_whole(model: nn.Module, mesh: Mesh) -> None:
    """Do the work of ``fully_shard`` except sharding.

    Bring a module to the device, and its inputs to fp32.
    """
    if not any(param.is_meta for param in model.parameters()):
        model.to(torch.device(mesh.dense.device_type))
    model.register_forward_pre_hook(_in_fp32, with_kwargs=True)


def _in_fp32(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.float() if is_real else value

    return tree_map(cast, (args, kwargs))


class ReplicaSums:
    """Sums the gradients of a module over the ranks that hold it whole, once a step."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model = model
        self._group = group
        self._waiting: deque[_Bucket] = deque()
        """In the order in which all ranks sum them."""
        self._sums: list[dist.Work] = []
        self._hooks: list[Any] = []
        self._uneven = uneven_gradients_of(model)

    def begin(self) -> None:
        """Call before the backward pass of the last micro-batch."""
        if self._group.size() == 1:
            return
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        for bucket in _buckets(reversed(list(named.items()))):
            self._waiting.append(bucket)
            made = partial(self._on_gradient, bucket)
            for param in bucket.params.values():
                hook = param.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def end(self) -> None:
        """Finish the backward pass; on return, gradients are summed for readers on the device."""
        for hook in self._hooks:
            hook.remove()
        while self._waiting:  # some parameters may have got no gradient
            bucket = self._waiting.popleft()
            # where ranks wait for the slowest, they do so inside of a collective: notes tell it
            self._sum(bucket, is_awaited=not self._waiting)
        for work in self._sums:
            work.wait()
        self._hooks, self._sums = [], []

    def _on_gradient(self, bucket: "_Bucket", _param: Tensor) -> None:
        bucket.pending -= 1
        while len(self._waiting) > 1 and not self._waiting[0].pending:  # the last one is for `end`
            self._sum(self._waiting.popleft(), is_awaited=False)

    @torch.no_grad()
    def _sum(self, bucket: "_Bucket", *, is_awaited: bool) -> None:
        if self._uneven is not None:  # else each has one on all ranks, or on none
            self._uneven.zeros(bucket.params)
        flat = bucket.flatten()
        if flat is None:
            return
        work = dist.all_reduce(flat, group=self._group, async_op=not is_awaited)
        if work is not None:
            self._sums.append(work)


class _Bucket:
    """Parameters whose gradients are summed together."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params
        self.pending = len(params)
        """Gradients that the backward pass has not made yet."""

    def flatten(self) -> Tensor | None:
        """Let gradients be views of one tensor, and return it; None: there are none."""
        params = [param for param in self.params.values() if param.grad is not None]
        grads = [param.grad for param in params if param.grad is not None]
        if not params:
            return None
        if len(grads) == 1 and grads[0].is_contiguous():
            return grads[0].view(-1)
        sizes = [param.numel() for param in params]
        flat = grads[0].new_empty(sum(sizes))
        parts = zip(torch.split(flat, sizes), params, strict=True)
        views = [part.view(param.shape) for part, param in parts]
        foreach_copy_(views, grads)
        for param, view in zip(params, views, strict=True):
            param.grad = view
        return flat


def _buckets(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[_Bucket]:
    """In the order given, each of at most ``BUCKET_BYTES``, or of one parameter."""
    bucket: dict[str, nn.Parameter] = {}
    size = 0
    for name, param in named:
        if bucket and size + param.nbytes > BUCKET_BYTES:
            yield _Bucket(bucket)
            bucket, size = {}, 0
        bucket[name] = param
        size += param.nbytes
    if bucket:
        yield _Bucket(bucket)
