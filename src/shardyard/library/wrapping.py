"""Two lines for an unchanged script: its forward, backward, clipping and steps stay.

``parallelize`` is the long form, with a step of its own. Here the reducer of torch's
DistributedDataParallel or FSDP2's hooks do all, so that ``loss.backward()`` is what it was.
Any module has the data axes; transformers' models of known families have the others too
(``model_parallel.py``).
"""

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardyard.config.schema.recipe import Recipe
from shardyard.control_groups import usable_memory_bytes
from shardyard.errors import RecipeError, RequestError
from shardyard.library.clipping import replace_clip_grad_norm
from shardyard.library.custom_script import check_custom_script, shard_custom_script
from shardyard.library.fully_sharded import (
    check_shardable,
    reject_added_parameters,
    replace_class,
    watch_parts,
)
from shardyard.library.mesh import build_mesh, devices_per_node, local_device
from shardyard.library.model import Sharded, attach, check_not_sharded, listed
from shardyard.library.model_parallel import check_splittable, shard_supported_script
from shardyard.library.replicated import replicate
from shardyard.library.sharded_tensors import guard_sharded_tensors, place_state
from shardyard.library.step import ExactMean
from shardyard.log import info, warn
from shardyard.parallel.apply import shard_script
from shardyard.parallel.custom_module import (
    blocks_named,
    module_errors,
    names_matching,
    rank_with_other_weights,
)
from shardyard.parallel.device import total_memory_bytes
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.rank_agreement import host_group
from shardyard.tasks.custom import Loss
from shardyard.units import format_bytes

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyOptimizers = TypeVar("AnyOptimizers", bound=Optimizer | Sequence[Optimizer])

VARIABLE = "SHARDYARD_PARALLEL"
MODEL_AXES = ("tp", "cp", "ep", "pp")
"""Axes that split models of known families."""
_MEMORY_FRACTION = 0.6
"""Share of a rank's memory; the rest is for activations and what libraries hold."""
_AXES = ("dp_replicate", "dp_shard", "zero")
_ALL_AXES = (*_AXES, *MODEL_AXES)


@overload
def wrap(
    model: AnyModule,
    *,
    gradients: Literal["mean"] = "mean",
    recipe: Recipe | None = None,
    blocks: str | Sequence[str] | None = None,
    plan: Mapping[str, str] | None = None,
    experts: str | Sequence[str] | None = None,
) -> AnyModule: ...


@overload
def wrap(
    model: AnyModule,
    optimizer: AnyOptimizers,
    *,
    gradients: Literal["mean", "exact"] = "mean",
    recipe: Recipe | None = None,
    blocks: str | Sequence[str] | None = None,
    plan: Mapping[str, str] | None = None,
    experts: str | Sequence[str] | None = None,
) -> tuple[AnyModule, AnyOptimizers]: ...


def wrap(
    model: AnyModule,
    optimizer: Any = None,
    *,
    gradients: Literal["mean", "exact"] = "mean",
    recipe: Recipe | None = None,
    blocks: str | Sequence[str] | None = None,
    plan: Mapping[str, str] | None = None,
    experts: str | Sequence[str] | None = None,
) -> Any:
    """Train a model on all processes, in place. All ranks call it together.

    The script stays: ``model(...)``, ``loss.backward()``, clipping, accumulation, schedulers.
    Degrees are those of ``SHARDYARD_PARALLEL`` "dp_shard=8,zero=2", or of a recipe's
    ``parallel``. Without either each rank holds the whole model if that fits, and else a share
    of its parameters; which of the two is logged. Every rank begins with the weights of rank 0.
    tp, cp, ep and pp split transformers' models of known families; pp needs
    ``forward_backward``. A model of one's own is split by tp with ``plan``, or by ep with
    ``experts``.

    Args:
        optimizer: One, or several in a list or tuple, made from the model's parameters; None:
            those made afterwards.
        gradients: mean: of ranks' and micro-batches' means, as DDP and FSDP do. exact: over all
            labels of a step alike; of transformers' models with a loss of their own.
        recipe: Recipe whose ``parallel`` is used, as of
            ``shardyard.resolve("recipe.yaml").recipe``. The script says the rest itself. The
            environment wins.
        blocks: Modules to shard one by one; None: the modules in the model's ``nn.ModuleList``.
        plan: How tp splits modules: name or pattern -> columns, rows or vocabulary.
        experts: Each ``nn.ModuleList`` of experts, by name or pattern, that ep deals over ranks.

    Returns:
        The same objects: the model, and with optimizers what was given.

    Raises:
        RecipeError: The degrees are no layout of these processes, or ranks cannot share the model.
        RequestError: The model, the optimizer or an axis is not for this form.
    """
    optimizers = listed(optimizer)
    _check_gradients(gradients, optimizers)
    _check_model(model)
    names = [_names_of(model, each) for each in optimizers]
    words, lists = plan or {}, (experts,) if isinstance(experts, str) else tuple(experts or ())
    is_own = bool(words or lists)
    mesh = _mesh(recipe, model, is_own=is_own)
    device = local_device(mesh.dense.device_type)
    split = _split_axes(mesh)
    if split:
        _check_options(split, gradients, None if is_own else blocks)
    chosen = _chosen_blocks(model, mesh, blocks, plan=words, experts=lists)
    if not _is_replicated(mesh):
        check_shardable(model, optimizers, ranks=mesh.layout.world_size)
    control = host_group(model)
    _check_same_model(model, control)
    _move(model, device)
    built_as = type(model)
    names, held_twice = _spread(
        model, mesh, optimizers, names, device=device, control=control, blocks=chosen,
        plan=words, experts=lists,
    )  # fmt: skip
    params = dict(model.named_parameters())
    for each, of_one in zip(optimizers, names, strict=True):
        _point(each, of_one, params)
    attach(
        model,
        Sharded(
            mesh=mesh, device=device, reader=_AsWritten(held_twice), params=params,
            has_weights=True, is_supported=bool(split) and not is_own, built_as=built_as,
            control=control,
        ),
    )  # fmt: skip
    if mesh.layout.ep > 1 or mesh.layout.pp > 1:
        replace_clip_grad_norm(model)
    if gradients == "exact":
        exact = ExactMean(model, params, device=device)
        for each in optimizers:
            exact.watch(each)
    return model if optimizer is None else (model, optimizer)


def _split_axes(mesh: Mesh) -> list[str]:
    """Return the axes that split the model itself, not only its parameters' storage."""
    return [axis for axis in MODEL_AXES if getattr(mesh.layout, axis) > 1]


def _is_replicated(mesh: Mesh) -> bool:
    """Whether each rank holds the whole model."""
    return mesh.layout.dp_shard == 1 and not _split_axes(mesh)


def _chosen_blocks(
    model: nn.Module,
    mesh: Mesh,
    blocks: str | Sequence[str] | None,
    *,
    plan: Mapping[str, str],
    experts: Sequence[str],
) -> Mapping[str, nn.Module]:
    """Return the modules to shard one by one, by name; empty where the family says them."""
    is_own = bool(plan or experts)
    chosen: Mapping[str, nn.Module] = {}
    if not _is_replicated(mesh) and (is_own or not _split_axes(mesh)):
        chosen = _blocks(model, but=experts) if blocks is None else _named(model, blocks)
    if is_own:
        check_custom_script(model, mesh.layout, blocks=chosen, plan=plan, experts=experts)
    return chosen


def _spread(
    model: nn.Module,
    mesh: Mesh,
    optimizers: Sequence[Optimizer],
    names: list[list[list[str]]],
    *,
    device: torch.device,
    control: Any,
    blocks: Mapping[str, nn.Module],
    plan: Mapping[str, str],
    experts: Sequence[str],
) -> tuple[list[list[list[str]]], Sequence[str]]:
    """Replicate, shard or split a model whose options are checked.

    Returns:
        For each optimizer and parameter group the names of its parameters now, and the names of
        parameters that two stages of a pipeline hold.
    """
    if _is_replicated(mesh):
        replicas = replicate(model)
        for each in optimizers:
            each.register_step_post_hook(replicas.broadcast_buffers)
        return names, ()
    _begin_alike(model, control)
    guard_sharded_tensors()
    tied_across_stages: Sequence[str] = ()
    if plan or experts:
        shard_custom_script(model, mesh, blocks=blocks, plan=plan, experts=experts)
    elif _split_axes(mesh):
        script, now = shard_supported_script(model, mesh, device=device)
        tied_across_stages = script.tied_across_stages
        names = [[[new for old in group for new in now[old]] for group in each] for each in names]
    else:
        shard_script(model, mesh, blocks=blocks, precision=MixedPrecisionPolicy())
        for each in optimizers:
            each.register_step_pre_hook(reject_added_parameters)
            each.register_load_state_dict_pre_hook(place_state)
        watch_parts(model)
    replace_class(model)
    return names, tied_across_stages


class _AsWritten:
    """Reads no batches: the script calls its model."""

    def __init__(self, tied_across_stages: Sequence[str]) -> None:
        self.tied_across_stages = tied_across_stages

    def read(self, batches: Sequence[Any], loss: Loss | None) -> Any:
        del batches, loss
        raise RequestError(
            "this model has been through wrap(): the script calls it, and loss.backward(), as "
            "before. accumulate() and evaluate() belong to shardyard.parallelize()."
        )


def _check_gradients(gradients: str, optimizers: Sequence[Optimizer]) -> None:
    if gradients == "exact" and not optimizers:
        raise RequestError(
            'gradients="exact" starts again after each step of the optimizer, and wrap() was given '
            "none. Write model, optimizer = shardyard.wrap(model, optimizer, ...)."
        )


def _check_options(
    split: Sequence[str], gradients: str, blocks: str | Sequence[str] | None
) -> None:
    axes = ", ".join(split)
    if gradients == "exact":
        raise RequestError(
            f'gradients="exact" with {axes}: ranks that split the model weight all their labels '
            'alike already, and the mean over the others is theirs. Leave gradients="mean", or use '
            "shardyard.parallelize() with accumulate(), which weights all alike."
        )
    if blocks is not None:
        raise RequestError(
            f"blocks={blocks!r} with {axes}: wrap() splits models of known families so, whose "
            "blocks are known. Leave blocks out; for a module of your own give plan= too, or "
            "experts=."
        )


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel | FSDPModule) or any(
        isinstance(module, FSDPModule) for module in model.modules()
    ):
        check_not_sharded(model)  # what wrap() did has fully_shard in it
        raise RequestError(
            f"this {type(model).__name__} is parallel already, by DistributedDataParallel or "
            "fully_shard. wrap() takes their place: remove those lines."
        )
    check_not_sharded(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RequestError(
            f"this {type(model).__name__} is on the meta device and has no weights: how they begin "
            "only you know. Build it with its weights."
        )


def _names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """By group of the optimizer: names of the parameters it steps."""
    names = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise RequestError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} "
                    f"that is not one of the {type(model).__name__}'s. Ranks would step it apart. "
                    "Make it a part of the model, or give it an optimizer of its own."
                )
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def _check_same_model(model: nn.Module, control: dist.ProcessGroup) -> None:
    mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    by_rank: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(by_rank, mine, group=control)
    rank = next((rank for rank, other in enumerate(by_rank) if other != by_rank[0]), None)
    if rank is not None:
        pairs = zip_longest(by_rank[0], by_rank[rank], fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        raise RequestError(
            f"rank {rank} has built another model than rank 0: {there} where that has {here} "
            "(name, shape, format). All ranks train one model: build it from the same settings."
        )


def _move(model: nn.Module, device: torch.device) -> None:
    """Parameters stay the same objects, as optimizers hold them."""
    before = [id(param) for param in model.parameters()]
    model.to(device)
    if before != [id(param) for param in model.parameters()]:
        raise RequestError(
            f"moving this {type(model).__name__} to {device} replaced its parameters, and the "
            f"optimizer holds those before. Call model.to({str(device)!r}) before the optimizer is "
            "made."
        )


@torch.no_grad()
def _begin_alike(model: nn.Module, control: dist.ProcessGroup) -> None:
    """Give every rank the buffers of rank 0, and its parameters where they differ."""
    differs = rank_with_other_weights(model, control) is not None
    for tensor in (*(model.parameters() if differs else ()), *model.buffers()):
        dist.broadcast(tensor, 0)


def _mesh(recipe: Recipe | None, model: nn.Module, *, is_own: bool) -> Mesh:
    given = os.environ.get(VARIABLE, "")
    degrees: dict[str, Any] = {}
    if given:
        degrees = _read(given)
    elif recipe is not None:
        degrees = {axis: getattr(recipe.parallel, axis) for axis in _ALL_AXES}
    asks_for_data_axes = any(degrees.get(axis, "auto") != "auto" for axis in _AXES)
    splits_model = any(degrees.get(axis, 1) not in (1, "auto") for axis in MODEL_AXES)
    if splits_model and not is_own:
        check_splittable(model)
    if asks_for_data_axes or splits_model:
        return build_mesh(**degrees)
    mesh = build_mesh()
    if mesh.layout.world_size == 1:
        return mesh
    need, room = _replicated_bytes(model), _memory_bytes(mesh)
    rooms: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(rooms, (need, room))
    need, room = max(need for need, _ in rooms), min(room for _, room in rooms)
    fits = need <= _MEMORY_FRACTION * room
    how = "each rank holds the whole model" if fits else "the model is sharded"
    if dist.get_rank() == 0:
        (info if fits else warn)(
            f"wrap(): {how}: weights, gradients and optimizer take about {format_bytes(need)}, and "
            f"a rank has {format_bytes(room)}, of which {_MEMORY_FRACTION:.0%} are for them. "
            f"{VARIABLE} says otherwise (dp_replicate={mesh.layout.world_size},dp_shard=1 or "
            f"dp_shard={mesh.layout.world_size})."
        )
    return build_mesh(dp_replicate=mesh.layout.world_size, dp_shard=1) if fits else mesh


def _replicated_bytes(model: nn.Module) -> int:
    """Weights and buffers; of what is trained also gradients, what sums them, and Adam's state."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return held + sum(4 * param.nbytes for param in model.parameters() if param.requires_grad)


def _memory_bytes(mesh: Mesh) -> int:
    kind = mesh.dense.device_type
    if kind == "cpu":
        return usable_memory_bytes() // devices_per_node(mesh.layout.world_size)
    return total_memory_bytes(local_device(kind))


def _read(text: str) -> dict[str, Any]:
    found = {}
    for word in text.split(","):
        axis, _, degree = word.strip().partition("=")
        if axis not in _ALL_AXES or not degree.strip().isdecimal():
            raise RequestError(
                f"{VARIABLE}={text!r}: {word.strip()!r} is not a degree of an axis. Write, for "
                f"instance, dp_shard=8,zero=2; axes are {', '.join(_ALL_AXES)}."
            )
        found[axis] = int(degree)
    return found


def _blocks(model: nn.Module, *, but: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules of outermost module lists, without those that share parameters.

    Args:
        but: Lists, by name or pattern, that are no blocks.
    """
    named = [name for name, _ in model.named_modules()]
    others = {name for pattern in but for name in names_matching(pattern, named)}
    blocks: dict[str, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            is_block = isinstance(module, nn.ModuleList) and path.rstrip(".") not in others
            if is_block and any(True for _ in child.parameters()):
                blocks[f"{path}{name}"] = child
            else:
                visit(child, f"{path}{name}.")

    visit(model, "")
    homes: dict[nn.Parameter, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        home = next((block for block in blocks if name.startswith(f"{block}.")), "")
        homes.setdefault(param, set()).add(home)
    shared = {home for of_one in homes.values() if len(of_one) > 1 for home in of_one}
    return {name: block for name, block in blocks.items() if name not in shared}


def _named(model: nn.Module, blocks: str | Sequence[str]) -> Mapping[str, nn.Module]:
    chosen, found = blocks_named(model, (blocks,) if isinstance(blocks, str) else blocks)
    found += module_errors(model, chosen, tp=1)
    if found:
        raise RecipeError(found, "wrap()")
    return chosen


def _point(
    optimizer: Optimizer, names: list[list[str]], params: Mapping[str, nn.Parameter]
) -> None:
    """Let the optimizer's groups hold the parameters that there are now."""
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        # a stage of a pipeline has some of them
        group["params"] = [params[name] for name in of_group if name in params]
