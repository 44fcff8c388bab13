"""Modules that multiply by copies of their matrices, and add gradients to fp32 sums themselves.

``LowPrecisionCopies`` decides on the copies and when they are made. Each product exists twice:
for autograd, and for a compiler, which receives the sum because it cannot create one.

Shape suffixes: N = tokens, I and O = features in and out, V = vocabulary, D = width.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardyard.config.formulas import holds_compute_copies
from shardyard.config.schema.recipe import Precision, Recipe
from shardyard.parallel.device import adds_to_fp32
from shardyard.parallel.matmul import is_plain
from shardyard.parallel.mesh import Mesh
from shardyard.torch_private import change_count, parameter_named, tree_map


class CastProduct(Protocol):
    """A product of weights that were cast before, as ``float8.Float8Product`` is one."""

    def cast(self, weight_OI: Tensor, /) -> tuple[Tensor, Tensor]:
        """W^T as each of the two below multiplies it."""

    def with_cast(self, x: Tensor, weight_IO: Tensor, /) -> Tensor:
        """x W^T."""

    def gradients_with_cast(
        self, grad: Tensor, x: Tensor, weight_IO: Tensor, /
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of W."""


def matrix_of(module: nn.Module) -> Tensor:
    """Return the matrix by which a linear module multiplies: its copy, or its weight."""
    operand: Any = getattr(module, "compute_copy", module.weight)
    matrix: Tensor = operand
    return matrix


def add_product(total: Tensor | None, grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Compute fp32 ``total`` + grad^T x, in place: a weight's gradient, rounded only in its sum.

    On CUDA a product of 16-bit matrices adds to fp32. Elsewhere both are made fp32 first, which
    is the same sum in another order, and moves more.
    """
    if total is None:
        shape = (grad_NO.shape[1], x_NI.shape[1])
        total = torch.empty(shape, dtype=torch.float32, device=x_NI.device)
        return write_product(total, grad_NO, x_NI)
    if adds_to_fp32(grad_NO.device):
        torch.ops.aten.addmm.dtype_out(total, grad_NO.T, x_NI, torch.float32, out=total)
    else:
        total.addmm_(grad_NO.T.float(), x_NI.float())
    return total


def write_product(total: Tensor, grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """The same where there is no sum yet: what ``total`` holds is overwritten unread."""
    if adds_to_fp32(grad_NO.device):
        torch.ops.aten.mm.dtype_out(grad_NO.T, x_NI, torch.float32, out=total)
    else:
        torch.mm(grad_NO.T.float(), x_NI.float(), out=total)
    return total


def _multiply(module: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.to(dtype)
    y: Tensor = _Product.apply(x, module.weight, matrix_of(module), bias)  # type: ignore[no-untyped-call]
    return y


def _multiply_in_graph(module: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.to(dtype)
    y: Tensor = _ProductInGraph.apply(  # type: ignore[no-untyped-call]
        x, module.weight, matrix_of(module), bias, module.gradient_sum, module.has_sum
    )
    return y


def _multiply_in_float8(module: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    y: Tensor = _Float8Product.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.cast_IO, module.cast_for_gradient_IO, module.product
    )
    return y if module.bias is None else y + module.bias.to(dtype)


def _multiply_in_float8_in_graph(module: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    y: Tensor = _Float8ProductInGraph.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.cast_IO, module.cast_for_gradient_IO, module.product,
        module.gradient_sum, module.has_sum,
    )  # fmt: skip
    return y if module.bias is None else y + module.bias.to(dtype)


LINEAR = {
    (False, False): _multiply,
    (False, True): _multiply_in_graph,
    (True, False): _multiply_in_float8,
    (True, True): _multiply_in_float8_in_graph,
}
"""(in fp8, in a graph) -> how a linear module multiplies."""


@torch.library.custom_op("shardyard::add_product", mutates_args=("total", "has_sum"))
def _add_in_graph(total: Tensor, has_sum: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Add a product like ``add_product``, opaque to a compiler: it sees what changes, and not how.

    Args:
        has_sum: In host memory: whether ``total`` is a sum already; else it is overwritten.
    """
    if has_sum.item():
        add_product(total, grad_NO, x_NI)
        return
    write_product(total, grad_NO, x_NI)
    has_sum.fill_(1)


@_add_in_graph.register_fake
def _(total: Tensor, has_sum: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    pass


@torch.library.custom_op("shardyard::add_gradient", mutates_args=("total", "has_sum"))
def _add_gradient_in_graph(total: Tensor, has_sum: Tensor, grad_OI: Tensor) -> None:
    """A weight's gradient to its sum, for a compiler."""
    if has_sum.item():
        total.add_(grad_OI)
        return
    total.copy_(grad_OI)
    has_sum.fill_(1)


@_add_gradient_in_graph.register_fake
def _(total: Tensor, has_sum: Tensor, grad_OI: Tensor) -> None:
    pass


def read_rows(module: nn.Embedding, _dtype: torch.dtype, ids: Tensor) -> Tensor:
    x: Tensor = _Rows.apply(ids, module.weight, matrix_of(module), module.padding_idx)  # type: ignore[no-untyped-call]
    return x


@cache
def computing(kind: type, compute: Callable[..., Tensor], dtype: torch.dtype) -> type:
    """Modules of a kind whose forward pass is another; a compiler takes those of one class for
    one, and those whose own ``forward`` was set each for itself."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return compute(self, dtype, x)

    return type(kind.__name__, (kind,), {"forward": forward})


class _Product(torch.autograd.Function):
    """x W^T + b by a copy of W; the gradient of W is added to its sum, and autograd sees none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, copy_OI: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, copy_OI)
        ctx.weight = weight_OI
        ctx.has_bias = bias_O is not None
        return F.linear(x, copy_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        x, copy_OI = ctx.saved_tensors
        grad, weight = grads[0], ctx.weight
        grad_NO = grad.flatten(0, -2)
        weight.grad = add_product(weight.grad, grad_NO, x.flatten(0, -2))
        of_x = grad @ copy_OI if ctx.needs_input_grad[0] else None
        return of_x, None, None, grad_NO.sum(dim=0) if ctx.has_bias else None


class _ProductInGraph(torch.autograd.Function):
    """Product like ``_Product``, where a compiler reads it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        copy_OI: Tensor,
        bias_O: Tensor | None,
        total_OI: Tensor,
        has_sum: Tensor,
    ) -> Tensor:
        del weight_OI  # with it autograd asks for a backward pass where x needs none
        ctx.save_for_backward(x, copy_OI, total_OI, has_sum)
        ctx.has_bias = bias_O is not None
        return F.linear(x, copy_OI, bias_O)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor | None, None, None]:
        x, copy_OI, total_OI, has_sum = ctx.saved_tensors
        grad_NO = grads[0].flatten(0, -2)
        torch.ops.shardyard.add_product(total_OI, has_sum, grad_NO, x.flatten(0, -2))
        of_bias = grad_NO.sum(dim=0) if ctx.has_bias else None
        return grads[0] @ copy_OI, None, None, of_bias, None, None


class _Float8Product(torch.autograd.Function):
    """Product like ``_Product``, in fp8: by W^T that was cast when it changed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        cast_IO: Tensor,
        cast_for_gradient_IO: Tensor,
        product: CastProduct,
    ) -> Tensor:
        ctx.save_for_backward(x, cast_for_gradient_IO)
        ctx.weight, ctx.product = weight_OI, product
        return product.with_cast(x, cast_IO)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, cast_IO = ctx.saved_tensors
        of_x, grad_OI = ctx.product.gradients_with_cast(grads[0], x, cast_IO)
        total = ctx.weight.grad
        ctx.weight.grad = grad_OI.float() if total is None else total.add_(grad_OI)
        return of_x, None, None, None, None


class _Float8ProductInGraph(torch.autograd.Function):
    """Product like ``_Float8Product``, where a compiler reads it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        cast_IO: Tensor,
        cast_for_gradient_IO: Tensor,
        product: CastProduct,
        total_OI: Tensor,
        has_sum: Tensor,
    ) -> Tensor:
        del weight_OI  # with it autograd asks for a backward pass where x needs none
        ctx.save_for_backward(x, cast_for_gradient_IO, total_OI, has_sum)
        ctx.product = product
        return product.with_cast(x, cast_IO)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        x, cast_IO, total_OI, has_sum = ctx.saved_tensors
        of_x, grad_OI = ctx.product.gradients_with_cast(grads[0], x, cast_IO)
        torch.ops.shardyard.add_gradient(total_OI, has_sum, grad_OI)
        return of_x, None, None, None, None, None, None


class _Rows(torch.autograd.Function):
    """Rows of a copy of a table; their gradients are added to the sum of the table's."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight_VD: Tensor, copy_VD: Tensor, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight_VD, padding
        return F.embedding(ids, copy_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        ids_N, grad_ND = ids.flatten(), grads[0].flatten(0, -2).float()
        if ctx.padding is not None:
            grad_ND = grad_ND.masked_fill((ids_N == ctx.padding)[:, None], 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if grad_ND.device.type == "cpu":  # row by row: the same bits each time
            weight.grad.index_add_(0, ids_N, grad_ND)
        else:  # sorted, and so the same bits each time; index_add_ is not
            weight.grad.index_put_((ids_N,), grad_ND, accumulate=True)
        return None, None, None, None


# A sharded model has fp32 master weights, a compute format and a reduction format.

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Format of gathered parameters and of activations; fp8 is the format of products only."""


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP's policy for resolved settings (no ``auto`` left)."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        # exact: FSDP sums nothing (parallel/reproducible_sums.py)
        reduce_dtype=torch.float32 if precision.reduce == "exact" else DTYPES[precision.reduce],
        output_dtype=DTYPES[precision.output],
    )


# One rank without sharding keeps fp32 weights, and a copy of each matrix in the compute format.
#
# ``fully_shard`` over one rank casts every weight before a step, adds every gradient of a
# micro-batch to its fp32 sum, and copies that sum once more. Here parameters remain the fp32
# weights under their names. Matrices multiply by a copy, which is renewed when the weights have
# changed. The product that computes a weight's gradient adds it to the fp32 sum directly. So
# nothing of the size of a matrix is moved outside of products. Parameters with one dimension
# (norms, biases) are cast at each use.
#
# A matrix that multiplies in fp8 is kept in both forms that its products read, one byte for each
# number: as much as one copy in bf16. It is cast once a step, not once a micro-batch.
#
# Shape suffixes: N = tokens, I and O = features in and out, D = width.


def can_hold_copies(
    model: nn.Module, mesh: Mesh, recipe: Recipe, *, anywhere: bool = False
) -> bool:
    """Check whether a module, in which no part has been replaced yet, is trained with copies.

    All of it is trained, in fp32, and each matrix is a linear module's or a table's.

    Args:
        anywhere: Also on devices on which it has not run.
    """
    if not holds_compute_copies(recipe, mesh.layout, anywhere=anywhere):
        return False
    return all(
        param.requires_grad
        and param.dtype == torch.float32
        and param.is_contiguous()
        and (param.dim() < 2 or _is_plain_linear_or_embedding(module))
        for module in model.modules()
        for param in module.parameters(recurse=False)
    )


def _is_plain_linear_or_embedding(module: nn.Module) -> bool:
    """Whether a module that has a matrix multiplies by it, or reads rows of it, and no more."""
    if isinstance(module, nn.Embedding):
        limits = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        return is_plain(module, nn.Embedding) and not limits
    return is_plain(module, nn.Linear)


class LowPrecisionCopies:
    """The copies of a model's matrices, and whether they are those of its weights."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        compiled: Iterable[nn.Module] = (),
        in_float8: Iterable[nn.Module] = (),
        float8: CastProduct | None = None,
    ) -> None:
        """Let a model compute with copies, in place. It may have no storage yet.

        Args:
            compiled: Its modules that are compiled, each with all that is in it.
            in_float8: Those that multiply by ``float8``.
        """
        self._model = model
        self._dtype = DTYPES[recipe.precision.compute]
        self._float8 = float8
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}
        """Count of changes of each copy's weight when the copy was made."""
        self._modules_of: dict[str, list[nn.Module]] = {}
        """Modules that multiply by, or read, a matrix: several where it is tied."""
        self._in_float8: dict[str, Any] = {}
        """The module that multiplies by a matrix in fp8."""
        names = {id(param): name for name, param in model.named_parameters()}
        in_graphs = {id(part) for module in compiled for part in module.modules()}
        cast = {id(module) for module in in_float8}
        self._in_graphs: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_cast = id(module) in cast
                is_in_graph = isinstance(module, nn.Linear) and id(module) in in_graphs
                if is_cast:
                    self._in_float8[names[id(module.weight)]] = module
                    module.product = float8  # type: ignore[assignment]
                else:
                    self._modules_of.setdefault(names[id(module.weight)], []).append(module)
                if is_in_graph:
                    self._in_graphs.append(module)
                compute: Callable[..., Tensor] = read_rows
                if isinstance(module, nn.Linear):
                    compute = LINEAR[is_cast, is_in_graph]
                kind: Any = type(module)
                module.__class__ = computing(kind, compute, self._dtype)
            elif any(True for _ in module.parameters(recurse=False)):
                _cast_when_used(module, self._dtype)
        model.register_forward_pre_hook(self._before)
        model.compute_copies = self  # type: ignore[assignment]

    def tensors(self) -> Mapping[str, Tensor]:
        """Parameter -> its copy, where it has one in the format that computes. Allocated when first
        asked for, where the model has storage."""
        if not self._copies:
            weights = dict(self._model.named_parameters())
            for matrix in self._in_graphs:  # a graph is given its sum: it cannot make it
                matrix.gradient_sum = torch.empty_like(matrix.weight.detach())
                matrix.has_sum = torch.zeros((), dtype=torch.bool)
            for name, modules in self._modules_of.items():
                copy = torch.empty_like(weights[name].detach(), dtype=self._dtype)
                self._copies[name] = copy
                for module in modules:
                    module.compute_copy = copy
        return self._copies

    def mark(self, *, current: bool) -> None:
        """An optimizer has changed the weights, which torch's fused ones do uncounted.

        Args:
            current: It has changed the copies with them.
        """
        weights = dict(self._model.named_parameters())
        self._seen = {n: change_count(weights[n]) for n in self._modules_of} if current else {}

    @torch.no_grad()
    def _before(self, *_args: object) -> None:
        """A forward pass comes: cast what was changed (by a load, by averages in its place)."""
        weights = dict(self._model.named_parameters())
        for name, copy in self.tensors().items():
            changes = change_count(weights[name])
            if self._seen.get(name) != changes:
                copy.copy_(weights[name])
                self._seen[name] = changes
        for name, module in self._in_float8.items():
            changes = change_count(weights[name])
            if self._seen.get(name) != changes:
                assert self._float8 is not None
                cast = self._float8.cast(weights[name].to(self._dtype))
                module.cast_IO, module.cast_for_gradient_IO = cast
                self._seen[name] = changes
        if not self._model.training:
            return
        for module in self._in_graphs:
            if module.weight.grad is None:  # the first micro-batch of a step
                module.has_sum.zero_()
                module.weight.grad = module.gradient_sum


def low_precision_copies_of(model: nn.Module) -> LowPrecisionCopies | None:
    """Return the copies that a model computes with. None if it has none."""
    copies: LowPrecisionCopies | None = getattr(model, "compute_copies", None)
    return copies


def return_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let a model return what it returns in a format, as a sharded one does; None: as it comes."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    if dtype is not None:
        model.register_forward_hook(lambda _module, _args, output: tree_map(cast, output))


def _cast_when_used(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module's own parameters, when it asks for them, be cast; under their names they stay.

    A property of the class is found before a parameter, and a compiler can follow it.
    """
    names = tuple(name for name, _ in module.named_parameters(recurse=False))
    kind: Any = type(module)
    module.__class__ = _casting(kind, names, dtype)


@cache
def _casting(kind: type, names: tuple[str, ...], dtype: torch.dtype) -> type:
    def cast(name: str) -> property:
        return property(lambda self: parameter_named(self, name).to(dtype))

    return type(kind.__name__, (kind,), {name: cast(name) for name in names})
