"""Tensor parallelism: each matrix of a block is split over ranks, and so are the tokens between.

In a block the ranks of a group meet four times: tokens are gathered before attention and before the
MLP, and the partial sums of each are added up and split by token again after it; the backward pass
does the transpose of each, and gathers twice more for the gradients of matrices. Between, each rank
holds the residual stream, norms and dropout of its share of the tokens only (sequence parallelism,
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2).

Parameters are DTensors, so that sharding, checkpoints and initial weights know what a rank holds;
modules compute on their local parts, so that no operator pays for DTensor's dispatch. A parameter
that every rank holds whole has seen only a share of the tokens: its gradient is a partial sum.

Shape suffixes: B = samples, L = all tokens, l = this rank's share, D = width, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardyard.families.family import Family
from shardyard.families.lora import A, B
from shardyard.models.local_shard import compute_shard_bounds, parameter_of, shard_bounds
from shardyard.models.lora import adapter_of
from shardyard.models.submodules import blocks_of, part_of
from shardyard.parallel.collectives import (
    all_gather,
    gather,
    reduce_scatter,
    sum_and_split,
    sum_over,
)
from shardyard.parallel.matmul import MatrixProduct, matrix_product_of
from shardyard.torch_private import group_named, storage_key

TOKENS = 1
"""The dimension of tokens in (B, L, D)."""


def shard_tensors(
    model: nn.Module, mesh: DeviceMesh, family: Family, *, keeps_sums: bool = False
) -> None:
    """Split a model over the one axis of ``mesh``, in place.

    Args:
        keeps_sums: Whether selective recompute shall find a block's sums, to keep them.
    """
    assert not family.unsplit, "refused by config/rules/layout.py"
    group = mesh.get_group()
    split = Split(mesh)

    def add_up(x_BLD: Tensor) -> Tensor:
        return sum_and_split(x_BLD, TOKENS, group)

    for block in blocks_of(model, family).values():
        for name in family.gathered:
            module = block.get_submodule(name)
            inputs = _GatheredTokens(module, group)
            for path in family.colwise:
                if path == name or path.startswith(f"{name}."):
                    matrix = split(block.get_submodule(path), Shard(0))
                    inputs.feed(matrix)
                    inputs.feed_adapter(matrix, split)
        for row in family.split_norms:
            _norm_over_ranks(split(block.get_submodule(row.module), Shard(0)), group)
        for name in family.rowwise:
            module = split(block.get_submodule(name), Shard(1))
            adapter = adapter_of(module)
            if adapter is not None:  # A's outputs are sums over ranks, and B sees a share of tokens
                split(module.get_submodule(A), Shard(1))
                adapter.between = add_up
            if keeps_sums and type(matrix_product_of(module)) is MatrixProduct:
                _sum_in_one_operator(module, group)
            else:
                sum_after(module, add_up)
    embedding, head = part_of(model, family.embedding), part_of(model, family.head)
    if embedding is not None:
        make_vocab_parallel(split(embedding, Shard(0)), add_up)
    if head is not None and family.head.split is not None:
        _GatheredTokens(head, group).feed(split(head, Shard(0)))
    for module in model.modules():
        split(module, Replicate())


def token_share(tokens_L: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return those tokens of a group whose residual stream this rank holds."""
    return tokens_L.chunk(mesh.size())[mesh.get_local_rank()]


class Split:
    """Replaces parameters by their share of them; each parameter once, also where it is tied."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._shares: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, module: nn.Module, placement: Placement) -> nn.Module:
        """Split the module's own parameters; a bias along rows stays whole. Returns the module."""
        own = dict(module.named_parameters(recurse=False))
        if not own or any(isinstance(param, DTensor) for param in own.values()):
            return module
        for name, param in own.items():
            is_split = isinstance(placement, Shard) and placement.dim < param.dim()
            where = placement if is_split else Replicate()
            if param not in self._shares:
                self._shares[param] = share_of(param, self._mesh, [where])
            setattr(module, name, self._shares[param])
        compute_on_shares(module, module.forward)
        return module


def share_of(
    param: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Parameter:
    """This rank's share of a parameter, with its values; one placement for each mesh axis."""
    offsets, shape = compute_shard_bounds(param.shape, mesh, placements)
    local = param.detach()
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        local = local.narrow(dim, offset, size)
    local = local.clone(memory_format=torch.contiguous_format)  # the whole can then be freed
    if not local.is_meta:
        local = local.to(mesh.device_type)
    share = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return parameter_of(share, param)


def compute_on_shares(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module a forward method that sees the local parts of the module's own parameters."""
    module.forward = OnShares(module, forward)


class OnShares:
    """A forward method during which the module's own parameters are plain tensors."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # attributes of the instance are found before parameters; FSDP replaces those as it gathers
        seen = self._module.__dict__
        names = []
        for name, param in self._module.named_parameters(recurse=False):
            if isinstance(param, DTensor):
                seen[name] = _local(param)
                names.append(name)
        try:
            return self._forward(*args, **kwargs)
        finally:
            for name in names:
                del seen[name]


def _local(param: DTensor) -> Tensor:
    placements = [Partial() if p.is_replicate() else p for p in param.placements]
    local: Tensor = param.to_local(grad_placements=placements)
    return local


class _GatheredTokens:
    """Gathers all tokens before a module, and once more for the gradients of its matrices.

    In between only this rank's share is kept (Korthikanti et al. 2022, section 4.2.2).
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)
        self._group = group
        self._share: Tensor | None = None
        """This rank's tokens, without their history."""
        self._tokens: Tensor | None = None
        """With it, for adapters."""
        self._readers = 0
        """Matrices whose gradient needs all tokens again."""
        self._gathered: tuple[Tensor, Tensor, int] | None = None
        """A share, all tokens, and how many matrices have used them."""

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        share: Tensor = args[0] if args else kwargs["hidden_states"]
        self._share, self._tokens = share.detach(), share
        x_BLD = gather(share, TOKENS, self._group)
        if args:
            return (x_BLD, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": x_BLD}

    def _after(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        # those who need them have them: held here they would outlive a recompute
        self._share = self._tokens = None

    def feed(self, module: nn.Module) -> None:
        """Let a matrix that multiplies the gathered tokens keep the share instead of them."""
        assert isinstance(module, nn.Linear)
        multiply = matrix_product_of(module)
        if not module.weight.requires_grad:  # then nothing of them is kept, nor gathered again
            return
        self._readers += 1

        def forward(x_BLD: Tensor) -> Tensor:
            product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                x_BLD, module.weight, self._share, self, multiply
            )
            return product if module.bias is None else product + module.bias

        compute_on_shares(module, forward)

    def feed_adapter(self, target: nn.Module, split: "Split") -> None:
        """Let the adapter of a matrix multiply this rank's tokens, and gather what A makes of them.

        That is narrow, while of all tokens A would keep the width of the model.
        """
        adapter = adapter_of(target)
        if adapter is None:
            return
        split(target.get_submodule(B), Shard(0))
        adapter.input = self._own_tokens
        adapter.between = partial(gather, dim=TOKENS, group=self._group)

    def _own_tokens(self) -> Tensor:
        assert self._tokens is not None
        return self._tokens

    def regather(self, share: Tensor) -> Tensor:
        """All tokens, gathered when the first of the matrices asks and freed after the last."""
        if self._gathered is None or not _is_same(self._gathered[0], share):
            pieces = gather(share, TOKENS, self._group)
            self._gathered = (share, pieces, 0)
        _, x_BLD, used = self._gathered
        self._gathered = (share, x_BLD, used + 1) if used + 1 < self._readers else None
        return x_BLD


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Autograd hands out other objects for the same memory; both are alive here."""
    return storage_key(one) == storage_key(other)


class _Product(torch.autograd.Function):
    """x W^T that keeps this rank's share of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLD: Tensor,
        weight: Tensor,
        share_BlD: Tensor,
        tokens: _GatheredTokens,
        multiply: MatrixProduct,
    ) -> Tensor:
        ctx.save_for_backward(share_BlD, weight)
        ctx.tokens = tokens
        ctx.multiply = multiply
        return multiply(x_BLD, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        share_BlD, weight = ctx.saved_tensors
        # under autocast the product was made in another format than its factors have
        x_BLD = ctx.tokens.regather(share_BlD).to(grads[0].dtype)
        weight = weight.to(grads[0].dtype)
        return *ctx.multiply.gradients(grads[0], x_BLD, weight), None, None, None


def _sum_in_one_operator(module: nn.Module, group: dist.ProcessGroup) -> None:
    assert isinstance(module, nn.Linear)

    def forward(x_BLi: Tensor) -> Tensor:
        summed_BlD: Tensor = _summed_product(x_BLi, module.weight, group.group_name)
        return summed_BlD if module.bias is None else summed_BlD + module.bias

    compute_on_shares(module, forward)


@torch.library.custom_op("shardyard::summed_product", mutates_args=())
def _summed_product(x_BLi: Tensor, weight_Di: Tensor, group: str) -> Tensor:
    """x W^T, added up over ranks and split by token.

    One operator, so that selective recompute keeps the share of the tokens that comes out of it:
    of two it would keep the product, which has all tokens, and add it up again. Full recompute is
    better off with two: it stops before the last product of a block, which this one would repeat.
    """
    return reduce_scatter(F.linear(x_BLi, weight_Di), TOKENS, group_named(group))


@_summed_product.register_fake
def _(x_BLi: Tensor, weight_Di: Tensor, group: str) -> Tensor:
    samples, tokens, _ = x_BLi.shape
    ranks = dist.get_world_size(group_named(group))
    return x_BLi.new_empty(samples, tokens // ranks, weight_Di.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    del output
    x_BLi, weight_Di, ctx.group = inputs
    ctx.save_for_backward(x_BLi, weight_Di)


def _gradients(ctx: Any, grad_BlD: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x_BLi, weight_Di = ctx.saved_tensors
    grad_BLD = all_gather(grad_BlD, TOKENS, group_named(ctx.group))
    if not ctx.needs_input_grad[1]:  # frozen
        return grad_BLD @ weight_Di, None, None
    return *MatrixProduct().gradients(grad_BLD, x_BLi, weight_Di), None


_summed_product.register_autograd(_gradients, setup_context=_keep)
SAVED_OPERATORS = {torch.ops.shardyard.summed_product.default}
"""Costly results, which selective recompute keeps."""


def sum_after(module: nn.Module, add_up: Callable[[Tensor], Tensor]) -> None:
    """Add up what the ranks' shares of a matrix contribute."""
    assert isinstance(module, nn.Linear)
    multiply = matrix_product_of(module)

    def forward(x: Tensor) -> Tensor:
        summed = add_up(multiply(x, module.weight))
        return summed if module.bias is None else summed + module.bias

    compute_on_shares(module, forward)


def _norm_over_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let an RMSNorm over outputs that ranks split divide by the mean square of all of them.

    One fp32 number a token passes between the ranks. As in transformers' module for OLMo 2, the
    scale is multiplied before the result is rounded.
    """
    norm: Any = module  # no class of torch's: each family of transformers has its own
    width, eps = norm.weight.shape[0], float(norm.variance_epsilon)

    def forward(x_BLi: Tensor) -> Tensor:
        wide_BLi = x_BLi.float()
        squares_BL1 = sum_over(wide_BLi.square().sum(dim=-1, keepdim=True), group)
        normed_BLi: Tensor = norm.weight * (wide_BLi * torch.rsqrt(squares_BL1 / width + eps))
        return normed_BLi.to(x_BLi.dtype)

    compute_on_shares(module, forward)


def make_vocab_parallel(module: nn.Module, add_up: Callable[[Tensor], Tensor]) -> None:
    """Each rank looks up the tokens whose rows it holds; the others' are zero in its sum."""
    assert isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor)
    (first, _), _ = shard_bounds(module.weight)
    padding = None if module.padding_idx is None else module.padding_idx - first

    def forward(tokens: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        row = tokens - first
        is_outside = (row < 0) | (row >= rows)
        own_padding = padding if padding is not None and 0 <= padding < rows else None
        x = F.embedding(row.masked_fill(is_outside, 0), module.weight, own_padding)
        return add_up(x.masked_fill(is_outside[..., None], 0.0))

    compute_on_shares(module, forward)
