"""The Hugging Face folder that a checkpoint's model is like: its config, tokenizer and names."""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import CheckpointError, JsonFileError, RequestError
from shardyard.families.config_json import shape_of_config
from shardyard.families.registry import family_of, is_family
from shardyard.families.shape import ModelShape
from shardyard.importers.checkpoints.tensors import (
    FLOATS,
    SourceCheckpoint,
    TensorView,
    blocks,
    check_cover,
    top_level_names,
)
from shardyard.io.files import parse_json, read_json, read_json_object

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_TAKEN = (".json", ".jinja", ".txt", ".model", ".md", ".tiktoken")
_OF_WEIGHTS = (INDEX, "complete.json", "adapter_config.json", "quantize_config.json")
_MAX_HEADER_BYTES = 10**8
"""Limit on the header in the format's own reader; a longer one is damage."""


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """Facts about a model that are known before its weights are read."""

    folder: Path
    config: Mapping[str, Any]
    shape: ModelShape | None
    """None: it is not known here."""
    tensor_shapes: Mapping[str, tuple[int, ...]] | None
    """Shapes of its tensors; None: the folder holds no weights, so names are not known."""
    copied: Mapping[str, Path]
    """Name of a file that goes along -> file."""

    @property
    def is_tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    @property
    def anchor(self) -> str:
        """The name of one tensor that is certainly there, the table of tokens if it is known.

        Raises:
            RequestError: Neither the family nor names are known.
        """
        if self.shape is not None:
            row = family_of(self.shape.model_type).embedding
            return row.in_files or f"{row.module}.{row.parameter}"
        if self.tensor_shapes:
            return min(self.tensor_shapes)
        raise RequestError(
            f"{self.folder} is of model type {self.config.get('model_type')!r}, whose names are "
            "not known here, and holds no weights that would tell them. Give a folder of the same "
            "model with its safetensors files: --like FOLDER."
        )


def read_reference_model(folder: Path) -> ReferenceModel:
    """Look at a Hugging Face folder.

    Raises:
        RequestError: It is none, or its files are damaged.
    """
    try:
        config = read_json_object(folder / CONFIG)
    except FileNotFoundError as error:
        raise RequestError(
            f"{folder} has no {CONFIG}. --like names a Hugging Face folder of the same model, such "
            "as the one that training began with."
        ) from error
    except JsonFileError as error:
        raise RequestError(f"{error} Fetch or save it again.") from error
    shape = shape_in(config, folder)
    copied = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _TAKEN and path.name not in (CONFIG, *_OF_WEIGHTS)
    }
    return ReferenceModel(
        folder=folder,
        config=config,
        shape=shape,
        tensor_shapes=_read_tensor_shapes(folder),
        copied=copied,
    )


def shape_in(config: Mapping[str, Any], folder: Path) -> ModelShape | None:
    """Sizes that a folder's config.json gives; None: they are of no model that is known here."""
    if not is_family(config.get("model_type")):
        return None
    with suppress(RequestError):  # what cannot be trained here may be imported all the same
        return shape_of_config(
            config, str(folder / CONFIG), is_random=False, overrides_dropout=True
        )
    return None


def _read_tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the weights that the folder holds; None: it holds none."""
    try:
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX)
            files = {folder / str(name) for name in index["weight_map"].values()}
        else:
            files = {folder / WEIGHTS} & set(folder.iterdir())
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(files):
            shapes |= _shapes(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"the weights of {folder} cannot be read ({type(error).__name__}: {error}). Give a "
            "whole folder, or one without weights."
        ) from error
    return shapes or None


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name of each tensor of a safetensors file -> its shape."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} has a header of {length:,} bytes")
        header = parse_json(content.read(length))
    return {
        str(name): tuple(int(size) for size in entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


# Which tensors of a checkpoint are the model, under the names of Hugging Face's files.

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")
"""Steps of names that wrappers add.

Source: FSDP1, activation checkpointing and torch.compile of torch 2.13. DDP's and DeepSpeed's
``module`` comes before all others and is a prefix.
"""

_BUFFERS = (".inv_freq", ".position_ids", ".masked_bias", ".attn.bias", ".attention.bias")
"""Ends of names of buffers that models recreate, and older checkpoints hold."""

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The weights to write, and what was left."""

    tensors: Mapping[str, TensorView]
    unused: Mapping[str, int]
    """Other contents of the checkpoint: first step of their names -> number of tensors."""


def find_model(
    checkpoint: SourceCheckpoint, like: ReferenceModel, *, prefix: str | None = None
) -> ModelWeights:
    """Select the model's tensors, and compare them with the folder's description of it.

    Args:
        prefix: Prefix of the model's names; None: it is found.

    Raises:
        CheckpointError: Tensors are missing, too many, of other shapes, or damaged.
        RequestError: It is not clear which tensors are the model.
    """
    named = _without_wrappers(checkpoint)
    before = _prefix(named, like, checkpoint) if prefix is None else prefix
    under = {
        name.removeprefix(before): tensor
        for name, tensor in named.items()
        if name.startswith(before)
    }
    firsts = _firsts(like)
    taken = {
        name: tensor
        for name, tensor in under.items()
        if name.partition(".")[0] in firsts and not name.endswith(_BUFFERS)
    }
    if not taken:
        raise RequestError(f"--prefix {before!r}: no tensor of the model has it. {_names(named)}")
    taken = {name: check_cover(name, tensor) for name, tensor in taken.items()}
    taken = _untied(taken, like)
    _check_tensors(taken, like, checkpoint)
    used = {before + name for name in taken}
    rest = [name for name in named if name not in used and not name.startswith(before)]
    rest += [name for name in under if name not in taken and name.partition(".")[0] not in firsts]
    left = Counter(name.partition(".")[0] for name in rest)
    return ModelWeights(tensors=dict(sorted(taken.items())), unused=dict(sorted(left.items())))


def _without_wrappers(checkpoint: SourceCheckpoint) -> dict[str, TensorView]:
    tensors: dict[str, TensorView] = {}
    for name, tensor in checkpoint.tensors.items():
        plain = ".".join(step for step in name.split(".") if step not in WRAPPERS)
        if plain in tensors:
            raise CheckpointError(f"{checkpoint.path} holds {plain} twice, once as {name}.")
        tensors[plain] = tensor
    return tensors


def _prefix(
    named: Mapping[str, TensorView], like: ReferenceModel, checkpoint: SourceCheckpoint
) -> str:
    anchor = like.anchor
    before = sorted(
        {name.removesuffix(anchor) for name in named if f".{name}".endswith(f".{anchor}")}
    )
    if len(before) == 1:
        return before[0]
    if before:
        shown = ", ".join(repr(each) for each in before[:_SHOWN])
        raise RequestError(
            f"{checkpoint.path} holds {len(before)} models, under {shown}: give one as --prefix."
        )
    raise CheckpointError(
        f"{checkpoint.path} holds no {anchor}, with which a model like that of {like.folder} "
        f"begins. {_names(named)} --like names a folder of the same model; names of another kind "
        "are not known here."
    )


def _names(named: Mapping[str, TensorView]) -> str:
    shown = ", ".join(sorted(named)[:_SHOWN])
    return f"It has {len(named)} tensors: {shown}{', ...' if len(named) > _SHOWN else ''}."


def _firsts(like: ReferenceModel) -> set[str]:
    """Return the first steps of the model's names."""
    firsts = top_level_names(like.tensor_shapes or ())
    if like.shape is not None:
        family = family_of(like.shape.model_type)
        rows = (*family.before, *family.after)
        firsts |= top_level_names([family.blocks, *(row.in_files or row.module for row in rows)])
    return firsts


def _untied(taken: Mapping[str, TensorView], like: ReferenceModel) -> dict[str, TensorView]:
    """Without a head that is the table of tokens, as Hugging Face's files leave it out."""
    if like.shape is None or not like.is_tied:
        return dict(taken)
    family = family_of(like.shape.model_type)
    head, table = (f"{row.module}.{row.parameter}" for row in (family.head, family.embedding))
    if head not in taken or table not in taken:
        return dict(taken)
    if taken[head].pieces != taken[table].pieces and not _are_equal(taken[head], taken[table]):
        raise CheckpointError(
            f"{head} and {table} differ, though {like.folder} ties them (tie_word_embeddings). "
            "Give a folder whose config.json does not."
        )
    return {name: tensor for name, tensor in taken.items() if name != head}


def _are_equal(one: TensorView, other: TensorView) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(blocks(one, one.dtype), blocks(other, other.dtype), strict=True)
    return all(bytes(first) == bytes(second) for first, second in pairs)


def _check_tensors(
    taken: Mapping[str, TensorView], like: ReferenceModel, checkpoint: SourceCheckpoint
) -> None:
    """Raise where the tensors are not those of the model that the folder describes."""
    odd = sorted(name for name, tensor in taken.items() if tensor.dtype not in FLOATS)
    if odd:
        raise CheckpointError(
            f"{checkpoint.path}: {', '.join(odd[:_SHOWN])}: {taken[odd[0]].dtype} is not a dtype "
            "for training; quantised weights are not read."
        )
    if like.tensor_shapes is not None:
        shapes = {name: tensor.shape for name, tensor in taken.items()}
        wrong = sorted(
            name
            for name in {*shapes, *like.tensor_shapes}
            if shapes.get(name) != like.tensor_shapes.get(name)
        )
        if wrong:
            raise CheckpointError(
                f"{checkpoint.path} is not the model of {like.folder}: "
                f"{_differences(wrong, shapes, like.tensor_shapes)}. --like names a folder of this "
                "model."
            )
    elif like.shape is not None:
        count = sum(tensor.elements for tensor in taken.values())
        if count != like.shape.parameters:
            raise CheckpointError(
                f"{checkpoint.path} holds {count:,} parameters, and the model of {like.folder} has "
                f"{like.shape.parameters:,}. Give the folder of this model as --like; with weights "
                "in it, what differs is named."
            )


def _differences(
    mismatched: Iterable[str],
    actual: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
) -> str:
    names = list(mismatched)
    words = []
    for name in names[:_SHOWN]:
        if name not in actual:
            words.append(f"{name} is missing")
        elif name not in expected:
            words.append(f"{name} is not in that model")
        else:
            words.append(f"{name} is {actual[name]}, there {expected[name]}")
    more = len(names) - _SHOWN
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
