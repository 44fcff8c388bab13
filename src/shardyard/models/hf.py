"""Load weights from a Hugging Face folder: each rank reads only the slices it holds."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shardyard.errors import DataError
from shardyard.families.family import Family
from shardyard.families.lora import is_adapter
from shardyard.models.local_shard import LocalShard, local_shard


def file_names(name: str, shape: torch.Size, family: Family) -> dict[str, int | None]:
    """What a parameter is called in Hugging Face's files.

    Returns:
        The name; or, for a parameter of all experts, one name for each of them, and its index.
    """
    blocks = f"{family.blocks}."
    number, _, in_block = name.removeprefix(blocks).partition(".")
    for row in family.block if name.startswith(blocks) else ():
        if row.in_files is None or f"{row.module}.{row.parameter}" != in_block:
            continue
        in_files = f"{blocks}{number}.{row.in_files}"
        if not row.per_expert:
            return {in_files: None}
        return {in_files.format(expert): expert for expert in range(shape[0])}
    return {name: None}


def load_weights(model: nn.Module, folder: Path, family: Family) -> None:
    """Fill all parameters but those of adapters in place from the folder's safetensors files.

    Raises:
        DataError: A file or a tensor is missing, damaged, or of another shape.
    """
    file_of = _tensor_files(folder)
    for older in [name for name in file_of if name != _as_now(name)]:
        file_of.setdefault(_as_now(older), file_of[older])
    names, wanted = _in_files(model, family)
    missing = sorted(name for name in names if name not in file_of)
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of the model's {len(names)} tensors, the first is "
            f"{missing[0]}. It holds weights of another model, or only a part of them; check "
            "config.json against the safetensors files."
        )
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(file_of[name], []).append(name)
    for file, names in by_file.items():
        _read_file(file, {name: wanted[name] for name in names})


def _as_now(name: str) -> str:
    """Norms of the first BERTs were saved under the names that they had in TensorFlow."""
    for older, now in (
        ("LayerNorm.gamma", "LayerNorm.weight"),
        ("LayerNorm.beta", "LayerNorm.bias"),
    ):
        if name.endswith(older):
            return name.removesuffix(older) + now
    return name


def _in_files(model: nn.Module, family: Family) -> tuple[list[str], dict[str, LocalShard]]:
    """Names of all tensors in the files, and of those of them that this rank holds its part."""
    names: list[str] = []
    held: dict[str, LocalShard] = {}
    for name, param in model.named_parameters():
        if is_adapter(name):
            continue
        shard = local_shard(param)
        for file_name, expert in file_names(name, param.shape, family).items():
            names.append(file_name)
            if expert is None:
                held[file_name] = shard
            elif 0 <= (here := expert - shard.offsets[0]) < shard.tensor.shape[0]:
                held[file_name] = LocalShard(
                    shard.tensor[here], shard.offsets[1:], shard.whole_shape[1:]
                )
    return names, held


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
            names = file.keys()
            stored = {_as_now(name): name for name in names}
            for name, shard in shards.items():
                source = file.get_slice(stored[name])
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
