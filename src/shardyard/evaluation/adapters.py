"""Adapters of a PEFT folder, added to the weights of their base in memory."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardyard.config.adapter_files import MERGE, PREFIX, WEIGHTS, AdapterFolder
from shardyard.config.model.source import model_folder
from shardyard.config.schema.recipe import Model
from shardyard.config.weight_files import ADAPTER, format_names
from shardyard.errors import RequestError
from shardyard.families.lora import A, B, scale_of


def base_folder(adapter: AdapterFolder) -> Path:
    """Return the folder of the model that an adapter was trained on; one of the hub is fetched.

    Raises:
        RequestError: There is no such folder or repository.
        AccessError: The hub asks for permission.
        CapacityError: The hub cannot be reached.
    """
    local = Path(adapter.base).expanduser()
    if local.is_dir():
        return local
    if adapter.base.startswith(("/", ".", "~")):
        raise RequestError(
            f"{adapter.folder} is an adapter of {adapter.base}, which does not exist here. Set "
            f"base_model_name_or_path in {adapter.folder / ADAPTER} to the folder of that model, "
            "or to its name on the hub."
        )
    model = Model(hub=adapter.base, revision=adapter.revision)
    folder = model_folder(model, log=lambda words: print(words, file=sys.stderr, flush=True))
    assert folder is not None, "the hub was asked for"
    return folder


def add_adapter(model: nn.Module, adapter: AdapterFolder) -> None:
    """Add scale B A to each matrix with an adapter, and replace modules that were trained whole.

    Sums are in fp32, and rounded once to the dtype of the weights.

    Raises:
        RequestError: The adapter cannot be read, or does not fit the model.
    """
    file = adapter.folder / WEIGHTS
    tensors = {name.removeprefix(PREFIX): each for name, each in _read(file).items()}
    modules = dict(model.named_modules())
    targets = {name.removesuffix(f".{A}.weight") for name in tensors if f".{A}." in name}
    pairs = {name: (f"{name}.{A}.weight", f"{name}.{B}.weight") for name in targets}
    whole = tensors.keys() - {each for pair in pairs.values() for each in pair}
    lacking = sorted(each for pair in pairs.values() for each in pair if each not in tensors)
    homeless = [name for name in targets if not hasattr(modules.get(name), "weight")]
    homeless += [name for name in whole if not _has_parameter(modules, name)]
    if lacking or homeless or not pairs:
        raise RequestError(
            f"{file} does not fit {adapter.base}: {format_names(sorted({*lacking, *homeless}))}. "
            f"Merge the adapter with the library that wrote it ({MERGE}), and use that folder."
        )
    _fit_vocabulary(model, tensors, whole)
    assert adapter.lora.rank is not None
    scale = scale_of(rank=adapter.lora.rank, alpha=adapter.lora.alpha, rslora=adapter.lora.rslora)
    with torch.no_grad():
        for name in whole:
            owner, _, kind = name.rpartition(".")
            _assign(model.get_submodule(owner).get_parameter(kind), tensors[name], name, adapter)
        for name, (down, up) in pairs.items():
            module = model.get_submodule(name)
            weight = module.get_parameter("weight")
            change = scale * (tensors[up].float() @ tensors[down].float())
            change = change.T if isinstance(module, Conv1D) else change
            if change.shape != weight.shape:
                raise _another_shape(name, change.shape, weight.shape, adapter)
            _assign(weight, weight.float() + change, name, adapter)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except FileNotFoundError as error:
        raise RequestError(
            f"{file} is missing. Give the folder that PEFT's save_pretrained or `shardyard export` "
            "wrote."
        ) from error
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{file} cannot be read: {error}. Save the adapter again.") from error
    return tensors


def _has_parameter(modules: Mapping[str, nn.Module], name: str) -> bool:
    owner, _, kind = name.rpartition(".")
    return owner in modules and isinstance(getattr(modules[owner], kind, None), nn.Parameter)


def _fit_vocabulary(model: Any, tensors: Mapping[str, Tensor], whole: set[str]) -> None:
    """Give the model the rows of a table of tokens that was trained with more of them."""
    table = model.get_input_embeddings().weight
    names = [name for name, each in model.named_parameters() if each is table]
    rows = next((len(tensors[name]) for name in names if name in whole), len(table))
    if rows != len(table):
        model.resize_token_embeddings(rows, mean_resizing=False)


def _assign(weight: nn.Parameter, value: Tensor, name: str, adapter: AdapterFolder) -> None:
    if value.shape != weight.shape:
        raise _another_shape(name, value.shape, weight.shape, adapter)
    weight.copy_(value)


def _another_shape(
    name: str, found: torch.Size, wanted: torch.Size, adapter: AdapterFolder
) -> RequestError:
    return RequestError(
        f"{adapter.folder / WEIGHTS}: {name} is for a matrix of {list(found)}, and that of "
        f"{adapter.base} has {list(wanted)}. Set base_model_name_or_path in "
        f"{adapter.folder / ADAPTER} to the model that the adapter was trained on."
    )
