"""Split a model over a mesh: one of a known family, or a module of the user's own."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardyard.config.layout import WHY_NOT
from shardyard.config.weight_files import read_weight_files
from shardyard.config.weights_match import match_weights
from shardyard.errors import DataError, Problem, RecipeError, RequestError
from shardyard.families.shape import ModelShape
from shardyard.library.mesh import local_device
from shardyard.library.supported import request, shard_supported, supported_shape
from shardyard.models import build
from shardyard.models.batch_norm import BatchNorms
from shardyard.parallel import apply
from shardyard.parallel.custom_module import (
    blocks_named,
    check_weights_equal,
    module_errors,
    read_plan,
    reject_scalars,
)
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.rank_agreement import host_group
from shardyard.tasks.custom import CustomComputation, Loss
from shardyard.tasks.loss_computation import Computation

# A module of the user's own: sharded block by block, and split over tp by a plan.

_OPTIONS = ("compile", "compute", "output", "prefetch", "recompute", "reduce")


def shard_custom(
    model: nn.Module,
    mesh: Mesh,
    *,
    blocks: Sequence[str],
    plan: Mapping[str, str],
    options: Mapping[str, Any],
) -> "CustomModel":
    """Change a module in place.

    Raises:
        RecipeError: Axes, names or sizes that do not fit; all of them.
        RequestError: A setting is not for modules of one's own.
    """
    others = [name for name in options if name not in _OPTIONS]
    if others:
        raise RequestError(
            f"{others[0]} is for models of a known family; {type(model).__name__} is a module of "
            f"your own. It takes blocks, plan, {', '.join(_OPTIONS)}."
        )
    recipe = request(mesh, options, shape=None, seq_len=None)
    tp = mesh.layout.tp
    words, found = read_plan(model, plan, tp=tp)
    chosen, unmatched = blocks_named(model, blocks)
    found += [*_axis_errors(mesh, plan), *unmatched, *module_errors(model, chosen, tp=tp)]
    if found:
        raise RecipeError(found, "parallelize()")
    remedy = apply.REMEDY.format("build_mesh(zero=2)")
    norms = apply.parallelize_custom(
        model, mesh, recipe=recipe, blocks=chosen, words=words, remedy=remedy
    )
    return CustomModel(model, mesh, norms)


def _axis_errors(mesh: Mesh, plan: Mapping[str, str]) -> list[Problem]:
    found = []
    for axis, reason in WHY_NOT.items():
        degree = 1 if axis == "tp" else getattr(mesh.layout, axis)  # a plan says how tp splits
        if degree > 1:
            text = f"={degree}: in a module of your own {reason}. Use dp_replicate, dp_shard and tp"
            found.append(Problem(f"parallel.{axis}", f"{text}."))
    if mesh.layout.tp > 1 and not plan:
        text = (
            f"={mesh.layout.tp} but no plan says what it splits. Give plan=, for instance "
            '{"layers.*.up": "columns", "layers.*.down": "rows"}.'
        )
        found.append(Problem("parallel.tp", text))
    return found


class CustomModel:
    """Reads batches by the loss function that comes with each call."""

    tied_across_stages: Collection[str] = ()

    def __init__(self, model: nn.Module, mesh: Mesh, norms: BatchNorms | None) -> None:
        self._model = model
        self._mesh = mesh
        self._norms = norms

    def read(
        self, batches: Sequence[Any], loss: Loss | None
    ) -> tuple[Computation[Any], Sequence[Any]]:
        """The batches as they are."""
        if loss is None:
            raise RequestError(
                f"what the loss of a {type(self._model).__name__} is, only you know. Give loss=, a "
                "function of (model, batch) that returns the sum of the losses and their number."
            )
        computation = CustomComputation(
            self._model, self._mesh, loss, loss_name="loss=", norms=self._norms
        )
        return computation, batches


# What belongs to the layout of a model, hung on the model as one attribute.

Optimizers = Optimizer | Sequence[Optimizer] | None
"""One, several that step parameters of their own, or none."""
_NAME = "_shardyard"


class BatchReader(Protocol):
    """Reader of a script's batches, with the computation for them."""

    @property
    def tied_across_stages(self) -> Collection[str]:
        """Names of parameters that both ends of a pipeline hold."""

    def read(
        self, batches: Sequence[Any], loss: Loss | None
    ) -> tuple[Computation[Any], Sequence[Any]]:
        """Return the computation for the batches, and the batches in its form.

        Raises:
            RequestError: They cannot be computed.
        """


@dataclass(kw_only=True)
class Sharded:
    """A model's place in a mesh."""

    mesh: Mesh
    device: torch.device
    reader: BatchReader
    params: dict[str, nn.Parameter]
    """Named once: FSDP shows other parameters while they are gathered."""
    has_weights: bool
    """False from the meta device until weights are filled or loaded."""
    is_supported: bool
    """A model of a family that recipes train, not one of the user's own."""
    built_as: type[nn.Module] | None = None
    """The class of a model that ``wrap`` changed, and that the script still calls."""
    finish_saves: Callable[[], None] | None = field(default=None, repr=False)
    """Waits until the checkpoints of a loop are durable; None: no loop writes any."""
    control: dist.ProcessGroup = field(repr=False)
    """A gloo group of all ranks, for facts in host memory."""

    def agree(self, fact: Any) -> list[Any]:
        """A small fact of every rank, by rank. All ranks call it."""
        by_rank: list[Any] = [None] * self.mesh.layout.world_size
        dist.all_gather_object(by_rank, fact, group=self.control)
        return by_rank

    def names_on_all_ranks(self, names: Iterable[str]) -> set[str]:
        """Names that any rank has: stages of pp, and experts of ep, are on some. All call it."""
        mine = list(names)
        if self.mesh.layout.pp == self.mesh.layout.ep == 1:
            return set(mine)
        return {name for found in self.agree(mine) for name in found}


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has been through ``parallelize``."""
    return hasattr(model, _NAME)


def attach(model: nn.Module, sharded: Sharded) -> None:
    """Hang it on the model."""
    setattr(model, _NAME, sharded)


def sharded(model: nn.Module) -> Sharded:
    """Return the layout stored on a model.

    Raises:
        RequestError: It has none.
    """
    found = getattr(model, _NAME, None)
    if not isinstance(found, Sharded):
        raise RequestError(
            f"this {type(model).__name__} is in no mesh yet: gradients, norms and checkpoints are "
            "those of all ranks together. Call model = shardyard.parallelize(model, mesh, ...) "
            "first, and pass the model that it returns."
        )
    return found


def listed(optimizer: Optimizers) -> Sequence[Optimizer]:
    """One optimizer, several, or none, as a list."""
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for each in found:
        if not isinstance(each, Optimizer):
            raise RequestError(
                f"{type(each).__name__} is not a torch.optim.Optimizer. Give one, or several in a "
                "list; a scheduler is made of each."
            )
    return found


AnyModule = TypeVar("AnyModule", bound=nn.Module)


class ParallelizeOptions(TypedDict, total=False):
    """Settings of a recipe by their last name; docs/settings.md says what each does."""

    attend_across_documents: bool
    compile: bool
    compute: str
    cp_exchange: str
    loss_chunk: int | str
    output: str
    prefetch: int
    recompute: str | int | tuple[str, ...]
    reduce: str
    router_aux_loss: float
    router_z_loss: float
    schedule: str
    virtual_stages: int


def parallelize(
    model: AnyModule,
    mesh: Mesh,
    *,
    seq_len: int | None = None,
    blocks: str | Sequence[str] | None = None,
    plan: Mapping[str, str] | None = None,
    **options: Unpack[ParallelizeOptions],
) -> AnyModule:
    """Split a model over a mesh, in place. All ranks call it with the same model.

    Without ``blocks`` the model is a transformers model of a family that recipes train; its own
    ``forward`` then gives way to ``accumulate`` and ``evaluate``. With ``blocks`` it is any module,
    which is called as before.

    Args:
        seq_len: Tokens of every sample; needed where cp, tp or pp is above 1.
        blocks: Modules to shard one by one: the name of a list of modules, or of modules.
        plan: How tp splits modules: name or pattern -> columns, rows or vocabulary.

    Returns:
        The model. Weights it has stay; on the meta device ``fill_weights`` or ``load_checkpoint``
        brings them.

    Raises:
        RecipeError: Settings that are wrong, or do not fit the model; all of them.
        RequestError: The model cannot be split, or the ranks do not hold the same one.
    """
    check_not_sharded(model)
    reject_scalars(model)
    has_weights = _has_weights(model)
    device = local_device(mesh.dense.device_type)
    control = host_group(model)
    is_known = blocks is None and plan is None
    if has_weights:
        check_weights_equal(model, control)
    reader: BatchReader
    if is_known:
        reader = shard_supported(model, mesh, device=device, seq_len=seq_len, options={**options})
    else:
        names = (blocks,) if isinstance(blocks, str) else tuple(blocks or ())
        given = {**options} if seq_len is None else {**options, "seq_len": seq_len}
        reader = shard_custom(model, mesh, blocks=names, plan=plan or {}, options=given)
    attach(
        model,
        Sharded(
            mesh=mesh,
            device=device,
            reader=reader,
            params=dict(model.named_parameters()),
            has_weights=has_weights,
            is_supported=is_known,
            control=control,
        ),
    )
    return model


def check_not_sharded(model: nn.Module) -> None:
    """It would be split twice."""
    if is_sharded(model):
        raise RequestError(
            f"this {type(model).__name__} has been through parallelize() or wrap() already; it "
            "would be split twice. Call it once, on a model as it was built or loaded."
        )


def fill_weights(model: nn.Module, folder: str | Path | None = None, *, seed: int = 0) -> None:
    """Give a model from the meta device its weights; each rank reads or makes what it holds.

    Args:
        folder: A Hugging Face folder with safetensors; None: random weights.
        seed: Of random weights, which are the same in every layout.

    Raises:
        DataError: The folder holds weights of another model, or damaged ones.
        RequestError: The model is not one that was split as a known family.
    """
    parts = sharded(model)
    if not parts.is_supported:
        raise RequestError(
            f"fill_weights() knows the weights of transformers' families, not those of a "
            f"{type(model).__name__} of your own. Build it with its weights before parallelize(); "
            "each rank keeps its share."
        )
    if folder is not None:
        _check_weights_match(Path(folder), supported_shape(model))
    build.fill_weights(model, folder=None if folder is None else Path(folder), seed=seed)
    parts.has_weights = True


def _check_weights_match(folder: Path, shape: ModelShape) -> None:
    """Raise if a folder holds less or more than the model, or a head that the model ties."""
    try:
        match = match_weights(folder, read_weight_files(folder), shape)
    except RequestError as error:
        raise DataError(str(error)) from error
    is_untied = match.shape.tie_word_embeddings != shape.tie_word_embeddings
    found = [*match.errors, *(match.notes if is_untied else ())]
    if found:
        raise DataError("\n".join(found))


def _has_weights(model: nn.Module) -> bool:
    on_meta = [name for name, param in model.named_parameters() if param.is_meta]
    count = sum(1 for _ in model.parameters())
    if on_meta and len(on_meta) < count:
        raise RequestError(
            f"{len(on_meta)} of the model's {count} parameters are on the meta device, the first "
            f"is {on_meta[0]}; the others have values. Build all of it in one way."
        )
    return not on_meta
