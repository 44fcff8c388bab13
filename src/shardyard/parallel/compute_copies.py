"""One rank without sharding: fp32 weights, and a copy of each matrix in the format that computes.

``fully_shard`` over one rank casts every weight before a step, adds every gradient of a micro-batch
to its fp32 sum, and copies that once more. Here parameters stay the fp32 weights, under their
names; matrices multiply by a copy that is made when weights have changed; and the product that
makes a weight's gradient adds it to the fp32 sum itself. So nothing as large as a matrix is moved
outside of products. What has one dimension (norms, biases) is cast whenever it is used.

A matrix that multiplies in fp8 is kept as both of its products read it, one byte a number each: as
much as a copy in bf16. It is cast once a step, not once a micro-batch.

Shape suffixes: N = tokens, I and O = features in and out, D = width.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardyard.config.compute_copies import holds_compute_copies
from shardyard.config.schema.recipe import Recipe
from shardyard.parallel.copied_products import LINEAR, CastProduct, computing, read_rows
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.precision import DTYPES
from shardyard.parallel.product import is_plain
from shardyard.torch_private import change_count, parameter_named, tree_map


def can_hold_copies(
    model: nn.Module, mesh: Mesh, recipe: Recipe, *, anywhere: bool = False
) -> bool:
    """Whether a module, in which nothing has been replaced yet, is trained with copies.

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
        and (param.dim() < 2 or _is_usual(module))
        for module in model.modules()
        for param in module.parameters(recurse=False)
    )


def _is_usual(module: nn.Module) -> bool:
    """Whether a module that has a matrix multiplies by it, or reads rows of it, and no more."""
    if isinstance(module, nn.Embedding):
        limits = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        return is_plain(module, nn.Embedding) and not limits
    return is_plain(module, nn.Linear)


class ComputeCopies:
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
        """Of each copy, how often its weight had been changed when the copy was made."""
        self._places: dict[str, list[nn.Module]] = {}
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
                    self._places.setdefault(names[id(module.weight)], []).append(module)
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
            for name, modules in self._places.items():
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
        self._seen = {n: change_count(weights[n]) for n in self._places} if current else {}

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


def compute_copies_of(model: nn.Module) -> ComputeCopies | None:
    """Those that a model computes with; None: it has none."""
    found: ComputeCopies | None = getattr(model, "compute_copies", None)
    return found


def return_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let a model return what it returns in a format, as a sharded one does; None: as it comes."""

    def cast(found: Any) -> Any:
        return found.to(dtype) if isinstance(found, Tensor) and found.is_floating_point() else found

    if dtype is not None:
        model.register_forward_hook(lambda _module, _args, found: tree_map(cast, found))


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
