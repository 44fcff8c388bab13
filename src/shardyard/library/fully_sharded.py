"""Operations that a script may do with a sharded model, and replacements for the others.

FSDP2 replaces parameters by shards of them. Code that reads them on one rank, keeps them
elsewhere, or depends on the earlier tensors would be silently wrong or end in torch's
assertions.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.library.sharded_tensors import GATHER, refuse_pickle
from shardyard.models.batch_norm import batch_norms_in
from shardyard.torch_private import has_hooks, tree_leaves

WHOLE = "SHARDYARD_PARALLEL=dp_replicate={},dp_shard=1"
"""Setting with which each rank holds the whole model."""
_OF_WHOLE_MATRICES = frozenset({"Muon", "Adafactor", "Rprop"})
"""Optimizers of torch and transformers that compute something else, or fail, on shards."""


def check_shardable(model: nn.Module, optimizers: Sequence[Optimizer], *, ranks: int) -> None:
    """Check a model and its optimizers before anything is changed.

    Raises:
        RecipeError: Parameters that cannot be sharded, or optimizers that keep them; all of them.
    """
    found = [*_parameter_errors(model), *_module_errors(model)]
    for optimizer in optimizers:
        found += _optimizer_errors(model, optimizer)
    if found:
        hint = (
            "The model is sharded here. Let each rank hold the whole model, as "
            f"DistributedDataParallel does: {WHOLE.format(ranks)}"
        )
        raise RecipeError(found, "wrap()", hint=hint)


def _parameter_errors(model: nn.Module) -> Iterator[Problem]:
    named = dict(model.named_parameters())
    for name, param in named.items():
        if has_hooks(param):
            yield Problem(name, "has a hook, which would never be called on a shard of it.")
        if param.dim() == 0:
            yield Problem(name, "is a single number, and shards are rows.")
        elif not param.numel():
            yield Problem(name, f"is empty, of shape {tuple(param.shape)}.")
        if not param.is_contiguous():
            yield Problem(name, "is not contiguous (channels_last?); shards are rows.")
        if param.is_complex():
            yield Problem(name, f"is of {param.dtype}, for which torch has no shards.")
    formats = {param.dtype: name for name, param in named.items() if param.requires_grad}
    if len(formats) > 1:
        words = ", ".join(f"{name} is {dtype}" for dtype, name in formats.items())
        yield Problem("parameters", f"of several formats: {words}. Shards need one.")


def _module_errors(model: nn.Module) -> Iterator[Problem]:
    for name in batch_norms_in(model):
        text = "is a batch normalisation: each rank keeps running statistics of its own samples."
        yield Problem(name, text)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield Problem(name, "makes sparse gradients, which are not rows of a shard.")


def _optimizer_errors(model: nn.Module, optimizer: Optimizer) -> Iterator[Problem]:
    kind = type(optimizer).__name__
    if optimizer.state:
        yield Problem(
            kind,
            "has state already, of parameters as they were before. Call wrap() before the first "
            "step (Adagrad makes its state at once), and load what was saved by shardyard.steps() "
            "or load_checkpoint().",
        )
    if any(group.get("fused") for group in optimizer.param_groups) and isinstance(optimizer, SGD):
        yield Problem(kind, "fused=True has no rule for shards. Leave fused out.")
    if kind in _OF_WHOLE_MATRICES:
        yield Problem(kind, "takes norms and signs of whole matrices, which are wrong on shards.")
    params = {id(param) for param in model.parameters()}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults") and _holds(value, params):
            yield Problem(kind, f"keeps parameters in {name}, and would continue to step those.")


def _holds(value: Any, params: set[int]) -> bool:
    if isinstance(value, Tensor):
        return id(value) in params
    if isinstance(value, Mapping):
        return any(_holds(each, params) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set):
        return any(_holds(each, params) for each in value)
    return False


class _FullySharded:
    """First base of the class of a sharded module."""

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        raise RequestError(
            f"a copy of this {_name_of(self)} would hold one rank's shard of it. Keep averages of "
            "weights as copies of model.parameters(), updated with Tensor.lerp_, or let each rank "
            "hold the whole model: " + _whole()
        )

    __reduce_ex__ = refuse_pickle

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``model.to(...)``: another device or format may be too late."""
        param = next(iter(self.parameters()))  # type: ignore[attr-defined]
        made = fn(torch.empty(0, dtype=param.dtype, device=param.device))
        if made.dtype != param.dtype:
            raise RequestError(
                f"this {_name_of(self)} is sharded as {param.dtype}, and {made.dtype} would not "
                f"fit what holds its gradients. Call model.to({made.dtype}) before wrap()."
            )
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own, rejected by pickle."""
        found = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if args or kwargs.get("prefix") or kwargs.get("destination") is not None:
            return found
        sharded = ShardedStateDict(found)
        sharded._metadata = getattr(found, "_metadata", None)
        return sharded


class ShardedStateDict(OrderedDict[str, Any]):
    """One rank's shards, which may be loaded again but not pickled."""

    _metadata: Any

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise RequestError(
            "this state_dict() holds one rank's shard of each parameter: a file of it would lack "
            f"the rest. Let all ranks call {GATHER} and save what rank 0 gets, or use "
            "shardyard.save_checkpoint(folder, model, optimizer, step=step); for a transformers "
            "model shardyard.export(model, folder)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedStateDict":
        """Copy the shards, to be loaded again: the best weights so far."""
        return ShardedStateDict((name, copy.deepcopy(value, memo)) for name, value in self.items())


def replace_class(model: nn.Module) -> None:
    """Change the class of a module in place that has been through ``fully_shard``.

    Under pp its stages have, and not the module.
    """
    kind = type(model)
    is_whole = isinstance(model, FSDPModule)
    before: Any = kind.__bases__[1] if is_whole else kind  # as fully_shard left it
    names = {
        "no_sync": _no_sync if is_whole else _sums_in_any_case,
        "module": property(lambda model: _view(model, before)),
    }
    added: dict[str, Any] = {n: new for n, new in names.items() if not hasattr(model, n)}
    if hasattr(model, "save_pretrained"):
        added["save_pretrained"] = _save_pretrained
    model.__class__ = type(
        before.__name__, (_FullySharded, kind), {"__doc__": before.__doc__, **added}
    )
    if is_whole:
        outside_graphs: Any = torch.compiler.disable
        model.register_forward_pre_hook(outside_graphs(_AsWrapped(model).check), prepend=True)
        model.register_forward_hook(outside_graphs(_watch_graphs_of_gradients))
    for name, param in model.named_parameters():
        param.register_hook = _reject_hook(name)  # type: ignore[method-assign]
        param.register_post_accumulate_grad_hook = _reject_hook(name)  # type: ignore[method-assign]


def watch_parts(model: nn.Module) -> None:
    """Reject a call of a part of a sharded model by itself: nothing gathers its parameters."""
    for name, module in model.named_modules():
        if (
            not isinstance(module, FSDPModule)
            and next(module.parameters(recurse=False), None) is not None
        ):
            module.register_forward_pre_hook(_refuse_alone(name))


def _refuse_alone(name: str) -> Any:
    def check(module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if any(isinstance(param, DTensor) for param in module.parameters(recurse=False)):
            raise RequestError(
                f"{name} is called by itself, and has one rank's shard of its parameters: they are "
                "gathered where the model is called, as in model(...), which also has to be the "
                "call in place of model.forward(...). Let its forward() call this part, or let "
                f"each rank hold the whole model: {_whole()}"
            )

    return check


class _AsWrapped:
    """Checks before a forward pass that a model has the modules and parameters it had."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = WeakSet(model.modules())

    def check(self, model: nn.Module, _args: Any) -> None:
        """Hook of the model.

        Raises:
            RequestError: Others took their place.
        """
        for place, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if own and module not in self._modules:
                raise RequestError(
                    f"{place} was not in this {_name_of(model)} when it was sharded: ranks would "
                    f"train it apart. Change modules before wrap(), or let each rank hold the "
                    f"whole model: {_whole()}"
                )
            for name, tensor in own.items():
                if not isinstance(tensor, nn.Parameter):
                    raise RequestError(
                        f"functional_call with another tensor than the parameter {name} of "
                        f"{place or _name_of(model)}: a forward pass of this sharded model gathers "
                        "its own. Change the parameters in place, or let each rank hold the whole "
                        f"model: {_whole()}"
                    )


def _watch_graphs_of_gradients(model: nn.Module, _args: Any, output: Any) -> None:
    """Reject a backward pass that keeps a graph: gathered parameters are gone by the second."""

    def reject(_grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RequestError(
                f"create_graph=True: a second backward pass through this sharded {_name_of(model)} "
                "needs parameters that were let go after the first. Let each rank hold the whole "
                f"model: {_whole()}"
            )

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(reject)  # type: ignore[no-untyped-call]


def reject_added_parameters(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Reject a step of parameters that are not sharded: ranks would step them apart."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, DTensor) and param.grad is not None:
                raise RequestError(
                    f"{type(optimizer).__name__} steps a parameter of shape {tuple(param.shape)} "
                    "that was not in the model when it was wrapped: its gradient is one rank's. "
                    "Add modules before wrap(), or let each rank hold the whole model: "
                    f"{_whole()}"
                )


def _reject_hook(name: str) -> Any:
    def reject(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RequestError(
            f"a hook of {name} would never be called: it is sharded, and so is "
            "its gradient. Change param.grad between backward() and optimizer.step(), or let each "
            f"rank hold the whole model: {_whole()}"
        )

    return reject


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Backward passes inside add up on this rank; the next one outside averages all of it."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def _sums_in_any_case(_model: Any) -> Iterator[None]:
    """The stages of a pipeline sum their gradients at the end of each call: the sum is the same."""
    yield


def _view(model: nn.Module, kind: Any) -> nn.Module:
    """The same module under the class it had."""
    view: nn.Module = object.__new__(kind)
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def _save_pretrained(model: nn.Module, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise RequestError(
        f"save_pretrained() of this {_name_of(model)} would write one rank's shards. Let all ranks "
        "call shardyard.export(model, folder), which writes the same files."
    )


def _name_of(model: Any) -> str:
    return type(model).__name__


def _whole() -> str:
    return WHOLE.format(torch.distributed.get_world_size())
