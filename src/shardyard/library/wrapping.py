"""Two lines for a script as it stands: its forward pass, backward pass, clipping and steps stay.

``parallelize`` is the long form: it takes every axis and a step of its own. Here FSDP2's hooks do
all, so that ``loss.backward()`` is what it was; axes that this cannot serve are refused by name.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from shardyard.config.schema import Recipe
from shardyard.errors import RecipeError, RequestError
from shardyard.library.exact_mean import ExactMean
from shardyard.library.mesh import build_mesh, local_device
from shardyard.library.model import refuse_second_split
from shardyard.library.state import Sharded, attach
from shardyard.models.batch_norm import batch_norms_in
from shardyard.parallel.apply import shard_script
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.own_module import (
    blocks_named,
    module_problems,
    refuse_differing_weights,
    refuse_scalars,
)
from shardyard.tasks.own import Loss

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

VARIABLE = "SHARDYARD_PARALLEL"
_AXES = ("dp_replicate", "dp_shard", "zero")
_LONG_FORM = {
    "tp": "its ranks read the same samples, and this script deals them by rank",
    "cp": "its ranks read parts of the same samples, and this script deals them by rank",
    "ep": "experts are on a mesh of their own, over which torch neither averages gradients as the "
    "script expects, nor takes one norm with the others",
    "pp": "a pipeline's backward passes are inside of its schedule, not in loss.backward()",
}
"""Axis -> why a script as it stands cannot have it."""


def wrap(
    model: AnyModule,
    optimizer: AnyOptimizer,
    *,
    gradients: Literal["mean", "exact"] = "mean",
    recipe: Recipe | None = None,
    blocks: str | Sequence[str] | None = None,
) -> tuple[AnyModule, AnyOptimizer]:
    """Split a model over all processes, in place, and let its optimizer step what is there then.

    The script stays: ``model(...)``, ``loss.backward()``, clipping, accumulation, schedulers.
    Degrees are those of ``SHARDYARD_PARALLEL`` ("dp_shard=8,zero=2"), or of a recipe's
    ``parallel``; without either all processes share the parameters, each with samples of its own.

    Args:
        optimizer: Made from the model's parameters, before its first step.
        gradients: mean: of ranks' and micro-batches' means, as DDP and FSDP do. exact: over all
            labels of a step alike; of transformers' models with a loss of their own.
        recipe: Whose ``parallel`` is taken, as of ``shardyard.resolve("recipe.yaml").recipe``; the
            rest the script says itself. The environment wins.
        blocks: Modules to shard one by one; None: what stands in the model's ``nn.ModuleList``.

    Returns:
        The same two objects.

    Raises:
        RecipeError: The degrees are no layout of these processes.
        RequestError: The model, the optimizer or an axis is not for this form.
    """
    _refuse_model(model)
    names = _names_of(model, optimizer)
    mesh = _mesh(recipe)
    control: dist.ProcessGroup = dist.new_group(backend="gloo")
    refuse_differing_weights(model, control)
    chosen = _blocks(model) if blocks is None else _named(model, blocks)
    device = local_device(mesh.dense.device_type)
    shard_script(model, mesh, blocks=chosen, precision=MixedPrecisionPolicy())
    params = dict(model.named_parameters())
    _point(optimizer, names, params)
    attach(
        model,
        Sharded(
            mesh=mesh, device=device, reader=_AsWritten(), params=params, has_weights=True,
            is_known=False, control=control,
        ),
    )  # fmt: skip
    if gradients == "exact":
        ExactMean(model, params, device=device).watch(optimizer)
    return model, optimizer


class _AsWritten:
    """Reads no batches: the script calls its model."""

    held_twice: Sequence[str] = ()

    def read(self, batches: Sequence[Any], loss: Loss | None) -> Any:
        del batches, loss
        raise RequestError(
            "this model has been through wrap(): the script calls it, and loss.backward(), as "
            "before. accumulate() and evaluate() belong to shardyard.parallelize()."
        )


def _refuse_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel | FSDPModule) or any(
        isinstance(module, FSDPModule) for module in model.modules()
    ):
        refuse_second_split(model)  # what wrap() did has fully_shard in it
        raise RequestError(
            f"this {type(model).__name__} is parallel already, by DistributedDataParallel or "
            "fully_shard. wrap() takes their place: remove those lines."
        )
    refuse_second_split(model)
    refuse_scalars(model)
    problems = module_problems(model, {}, tp=1)
    if problems:
        raise RecipeError(problems, "wrap()")
    norms = batch_norms_in(model)
    if norms:
        raise RequestError(
            f"{next(iter(norms))} is a batch normalisation: its running statistics would be those "
            "of one rank's samples. Use shardyard.parallelize(model, mesh, blocks=...) with "
            "accumulate(), which keeps those of the step; or GroupNorm or LayerNorm."
        )


def _names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """By group of the optimizer: names of the parameters it steps."""
    if optimizer.state:
        raise RequestError(
            f"{type(optimizer).__name__} has state already, of parameters as they were before. "
            "Call wrap() before the first step (Adagrad makes its state at once: take another), "
            "and load what was saved by shardyard.steps() or load_checkpoint()."
        )
    names = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise RequestError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} "
                    f"that is not one of the {type(model).__name__}'s. Ranks would step it apart. "
                    "Make it a part of the model, or give it an optimizer of its own."
                )
        if group.get("fused") and isinstance(optimizer, SGD):
            raise RequestError(
                "SGD(fused=True) cannot step parameters that ranks share: torch has no rule for "
                "it. Leave fused out."
            )
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def _mesh(recipe: Recipe | None) -> Mesh:
    given = os.environ.get(VARIABLE, "")
    degrees: dict[str, Any] = {}
    source = VARIABLE
    if given:
        degrees = _read(given)
    elif recipe is not None:
        source = "the recipe"
        degrees = {axis: getattr(recipe.parallel, axis) for axis in (*_AXES, *_LONG_FORM)}
    for axis, reason in _LONG_FORM.items():
        if degrees.get(axis, 1) not in (1, "auto"):
            raise RequestError(
                f"{source} asks for {axis}={degrees[axis]}, which a script as it stands cannot "
                f"have: {reason}. Use the long form, shardyard.parallelize() with accumulate()."
            )
    return build_mesh(**degrees)


def _read(given: str) -> dict[str, Any]:
    found = {}
    for word in given.split(","):
        axis, _, degree = word.strip().partition("=")
        if axis not in (*_AXES, *_LONG_FORM) or not degree.strip().isdecimal():
            raise RequestError(
                f"{VARIABLE}={given!r}: {word.strip()!r} is no degree of an axis. Write, for "
                f"instance, dp_shard=8,zero=2; axes are {', '.join(_AXES)}."
            )
        found[axis] = int(degree)
    return found


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """What stands in outermost lists of modules, without what shares parameters with others."""
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            if isinstance(module, nn.ModuleList) and any(True for _ in child.parameters()):
                found[f"{path}{name}"] = child
            else:
                look(child, f"{path}{name}.")

    look(model, "")
    homes: dict[nn.Parameter, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        home = next((block for block in found if name.startswith(f"{block}.")), "")
        homes.setdefault(param, set()).add(home)
    shared = {home for of_one in homes.values() if len(of_one) > 1 for home in of_one}
    return {name: block for name, block in found.items() if name not in shared}


def _named(model: nn.Module, blocks: str | Sequence[str]) -> Mapping[str, nn.Module]:
    chosen, found = blocks_named(model, (blocks,) if isinstance(blocks, str) else blocks)
    found += module_problems(model, chosen, tp=1)
    if found:
        raise RecipeError(found, "wrap()")
    return chosen


def _point(
    optimizer: Optimizer, names: list[list[str]], params: Mapping[str, nn.Parameter]
) -> None:
    """Let the optimizer's groups hold the parameters that there are now."""
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [params[name] for name in of_group]
