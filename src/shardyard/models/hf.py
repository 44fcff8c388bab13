"""Load weights from a Hugging Face folder: each rank reads only the slices it holds."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shardyard.errors import DataError
from shardyard.models.local_shard import LocalShard, local_shard


def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill all parameters in place from the folder's safetensors files.

    Raises:
        DataError: A file or a tensor is missing, damaged, or of another shape.
    """
    file_of = _tensor_files(folder)
    wanted = {name: local_shard(param) for name, param in model.named_parameters()}
    missing = sorted(name for name in wanted if name not in file_of)
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of the model's {len(wanted)} tensors, the first is "
            f"{missing[0]}. It holds weights of another model, or only a part of them; check "
            "config.json against the safetensors files."
        )
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(file_of[name], []).append(name)
    for file, names in by_file.items():
        _read_file(file, {name: wanted[name] for name in names})


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise DataError(
            f"{folder} holds no model.safetensors and no model.safetensors.index.json. Weights in "
            "pickle files (.bin, .pt) are not opened, as opening one runs code. Convert them with "
            "transformers' save_pretrained, or set model.weights=random."
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise _damaged(single, error) from error


def _read_file(path: Path, shards: dict[str, LocalShard]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name, shard in shards.items():
                source = file.get_slice(name)
                if tuple(source.get_shape()) != shard.whole_shape:
                    raise DataError(
                        f"{path}: tensor {name} has shape {list(source.get_shape())}, the model "
                        f"needs {list(shard.whole_shape)}. Check config.json of the folder."
                    )
                if shard.tensor.numel():
                    shard.tensor.copy_(source[shard.slices].to(torch.float32))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read: {error}. Fetch the file again.")
