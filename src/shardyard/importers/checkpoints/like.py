"""The Hugging Face folder that a checkpoint's model is like: its config, tokenizer and names."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import JsonFileError, RequestError
from shardyard.families.config_json import shape_of_config
from shardyard.families.registry import family_of, is_family
from shardyard.families.shape import ModelShape
from shardyard.io.files import parse_json, read_json, read_json_object

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_TAKEN = (".json", ".jinja", ".txt", ".model", ".md", ".tiktoken")
_OF_WEIGHTS = (INDEX, "complete.json", "adapter_config.json", "quantize_config.json")
_MAX_HEADER_BYTES = 10**8
"""Of the format's own reader; a longer one is damage."""


@dataclass(frozen=True, kw_only=True)
class Like:
    """What is known of a model before its weights are read."""

    folder: Path
    config: Mapping[str, Any]
    shape: ModelShape | None
    """None: it is not known here."""
    known: Mapping[str, tuple[int, ...]] | None
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
        if self.known:
            return min(self.known)
        raise RequestError(
            f"{self.folder} is of model type {self.config.get('model_type')!r}, whose names are "
            "not known here, and holds no weights that would tell them. Give a folder of the same "
            "model with its safetensors files: --like FOLDER."
        )


def read_like(folder: Path) -> Like:
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
    return Like(folder=folder, config=config, shape=shape, known=_known(folder), copied=copied)


def shape_in(config: Mapping[str, Any], folder: Path) -> ModelShape | None:
    """Sizes that a folder's config.json gives; None: they are of no model that is known here."""
    if not is_family(config.get("model_type")):
        return None
    with suppress(RequestError):  # what cannot be trained here may be imported all the same
        return shape_of_config(config, str(folder / CONFIG), is_random=False, says_dropout=True)
    return None


def _known(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the weights that the folder holds; None: it holds none."""
    try:
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX)
            files = {folder / str(name) for name in index["weight_map"].values()}
        else:
            files = {folder / WEIGHTS} & set(folder.iterdir())
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(files):
            found |= _shapes(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"the weights of {folder} cannot be read ({type(error).__name__}: {error}). Give a "
            "whole folder, or one without weights."
        ) from error
    return found or None


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
