"""Split a model over a mesh: one of a known family, or a module of the user's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from torch import nn

from shardyard.config.weight_files import read_weight_files
from shardyard.config.weights_match import match_weights
from shardyard.errors import DataError, RequestError
from shardyard.families.shape import ModelShape
from shardyard.library.mesh import local_device
from shardyard.library.own import shard_own
from shardyard.library.state import Reader, Sharded, attach, is_sharded, sharded
from shardyard.library.supported import known_shape, shard_known
from shardyard.models import build
from shardyard.parallel.host_group import host_group
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.own_module import refuse_differing_weights, refuse_scalars

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Options(TypedDict, total=False):
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
    **options: Unpack[Options],
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
    refuse_second_split(model)
    refuse_scalars(model)
    has_weights = _has_weights(model)
    device = local_device(mesh.dense.device_type)
    control = host_group(model)
    is_known = blocks is None and plan is None
    if has_weights:
        refuse_differing_weights(model, control)
    reader: Reader
    if is_known:
        reader = shard_known(model, mesh, device=device, seq_len=seq_len, options={**options})
    else:
        names = (blocks,) if isinstance(blocks, str) else tuple(blocks or ())
        given = {**options} if seq_len is None else {**options, "seq_len": seq_len}
        reader = shard_own(model, mesh, blocks=names, plan=plan or {}, options=given)
    attach(
        model,
        Sharded(
            mesh=mesh,
            device=device,
            reader=reader,
            params=dict(model.named_parameters()),
            has_weights=has_weights,
            is_known=is_known,
            control=control,
        ),
    )
    return model


def refuse_second_split(model: nn.Module) -> None:
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
    if not parts.is_known:
        raise RequestError(
            f"fill_weights() knows the weights of transformers' families, not those of a "
            f"{type(model).__name__} of your own. Build it with its weights before parallelize(); "
            "each rank keeps its share."
        )
    if folder is not None:
        _refuse_other_weights(Path(folder), known_shape(model))
    build.fill_weights(model, folder=None if folder is None else Path(folder), seed=seed)
    parts.has_weights = True


def _refuse_other_weights(folder: Path, shape: ModelShape) -> None:
    """Raise if a folder holds less or more than the model, or a head that the model ties."""
    try:
        match = match_weights(folder, read_weight_files(folder), shape)
    except RequestError as error:
        raise DataError(str(error)) from error
    is_untied = match.shape.tie_word_embeddings != shape.tie_word_embeddings
    found = [*match.problems, *(match.notes if is_untied else ())]
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
