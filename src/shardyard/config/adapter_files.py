"""Folder of an adapter in PEFT's format: its settings, its base, and its tensors by their headers.

No tensor is read and torch is not needed, so this runs before anything is planned or started.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.schema.recipe import Lora
from shardyard.config.weight_files import ADAPTER, format_names
from shardyard.errors import JsonFileError, RequestError
from shardyard.families.lora import A, B, targets_of, tied_head, trained_modules
from shardyard.families.shape import ModelShape
from shardyard.io.digests import read_header
from shardyard.io.files import read_json_object

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the name of a matrix in PEFT's file."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "bias": ("none", None),
}
"""Key of adapter_config.json -> its values under which an adapter is two matrices a target."""

MERGE = "peft: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(NEW)"


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """Content of adapter_config.json."""

    folder: Path
    base: str
    """Folder or hub repository of the model that the adapter was trained on."""
    revision: str | None
    lora: Lora
    """Settings of ``model.lora`` that mean this adapter."""


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").exists()


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Read adapter_config.json.

    Raises:
        RequestError: It is damaged, or another kind of adapter than LoRA on whole matrices.
    """
    path = folder / ADAPTER
    try:
        content = read_json_object(path)
    except JsonFileError as error:
        raise RequestError(f"{error} Save the adapter again.") from error
    if content.get("peft_type") != "LORA":
        raise RequestError(
            f"{path}: peft_type={content.get('peft_type')!r} is not supported; LORA is. Merge "
            f"it into its base first ({MERGE}), and use that folder."
        )
    others = [
        f"{key}={content[key]!r}"
        for key, plain in _UNSUPPORTED.items()
        if key in content and content[key] not in plain
    ]
    if others:
        raise RequestError(
            f"{path}: {', '.join(others)}: not supported. Merge the adapter into its base "
            f"first ({MERGE}), and use that folder."
        )
    rank, targets, base = (
        content.get(key) for key in ("r", "target_modules", "base_model_name_or_path")
    )
    if not isinstance(rank, int) or not isinstance(targets, list) or not targets:
        raise RequestError(
            f"{path} has r={rank!r} and target_modules={targets!r}, not a number and a list of "
            "modules. Save the adapter again with target_modules as a list of names."
        )
    if not isinstance(base, str) or not base:
        raise RequestError(
            f"{path} does not name the model that the adapter was trained on. Give it and the "
            f"adapter: model.path=BASE model.lora.path={folder} model.lora.rank={rank}."
        )
    lora: dict[str, Any] = {
        "rank": rank,
        "alpha": float(content.get("lora_alpha") or 8),  # the default of PEFT's LoraConfig
        "dropout": float(content.get("lora_dropout") or 0.0),
        "rslora": content.get("use_rslora") is True,
        "targets": tuple(map(str, targets)),
        "modules_to_save": tuple(map(str, content.get("modules_to_save") or ())),
        "path": str(folder),
    }
    revision = content.get("revision")
    return AdapterFolder(
        folder=folder,
        base=base,
        revision=revision if isinstance(revision, str) else None,
        lora=Lora(**lora),
    )


def adapter_shapes_of(shape: ModelShape, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Name of each matrix of a model's adapters, and of the modules next to them -> its shape."""
    assert lora.rank is not None
    found: dict[str, tuple[int, ...]] = trained_modules(shape, lora.modules_to_save)
    for target in (each for block in targets_of(shape, lora.targets).values() for each in block):
        found[f"{target.module}.{A}.weight"] = (lora.rank, target.inputs(shape))
        found[f"{target.module}.{B}.weight"] = (target.row.rows(shape), lora.rank)
    return found


def adapter_errors(shape: ModelShape, lora: Lora, *, knows_labels: bool = True) -> list[str]:
    """Say how the tensors of ``model.lora.path`` differ from those that the recipe asks for.

    Args:
        knows_labels: Whether the shape has the number of labels of the data; else the rows of a
            head over labels are not compared.
    """
    return list(_errors(Path(str(lora.path)), shape, lora, knows_labels=knows_labels))


def _errors(folder: Path, shape: ModelShape, lora: Lora, *, knows_labels: bool) -> Iterator[str]:
    file = folder / WEIGHTS
    try:
        stored = {name.removeprefix(PREFIX): each for name, each in read_header(file).items()}
    except FileNotFoundError:
        yield (
            f"={folder} holds no {WEIGHTS}. Give the folder that PEFT's save_pretrained or "
            "`shardyard export` wrote."
        )
        return
    except (OSError, ValueError) as error:
        yield f"={folder}: {file} {error}. Export or save the adapter again."
        return
    wanted = adapter_shapes_of(shape, lora)
    lacking = sorted(wanted.keys() - stored.keys())
    surplus = sorted(stored.keys() - wanted.keys() - {*(tied_head(shape, wanted) or ())})
    differing = {
        name: f"{name} has {list(stored[name].shape)}, not {list(size)}"
        for name, size in wanted.items()
        if name in stored and stored[name].shape != size
    }
    merge = "or merge it into its base, give that in model.path, and leave model.lora.path out"
    if shape.label_head is not None:
        head = f"{shape.family.head.module}."
        other = [name for name in differing if name.startswith(head)]
        differing = {name: text for name, text in differing.items() if name not in other}
        if other and knows_labels:
            yield (
                f"={folder} has a head over {stored[other[0]].shape[0]} labels, and the data has "
                f"{shape.num_labels}. Name those of the adapter in data.labels, {merge}."
            )
    if differing:
        yield (
            f"={folder} has {len(differing):,} matrices of another shape than this model with "
            f"model.lora.rank={lora.rank}: {format_names(list(differing.values()))}. Use the rank "
            f"and the base that the adapter was trained with, {merge}."
        )
    if lacking or surplus:
        parts = [f"lacks {format_names(lacking)}"] if lacking else []
        parts += [f"has {format_names(surplus)} besides"] if surplus else []
        yield (
            f"={folder} {' and '.join(parts)}. Name the matrices that the adapter was trained on "
            f"in model.lora.targets, {merge}."
        )
