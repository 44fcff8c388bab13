"""Load weights from a Hugging Face folder: each rank reads only the slices it holds."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardyard.config.adapter_files import PREFIX, WEIGHTS
from shardyard.config.weight_files import read_weight_files
from shardyard.errors import DataError, RequestError
from shardyard.families.family import Family
from shardyard.families.file_tensors import ParameterPiece, file_tensors, stored_names, whole_shape
from shardyard.families.lora import is_adapter
from shardyard.file_faults import content_error
from shardyard.io.digests import StoredTensor
from shardyard.models.local_shard import LocalShard, local_shard
from shardyard.models.new_rows import NewRows, rows_by_token, split_new_rows


def load_weights(
    model: nn.Module, folder: Path, family: Family, new_rows: NewRows | None = None
) -> set[str]:
    """Fill parameters in place from the folder's safetensors files: all that have storage, and are
    no adapters.

    Args:
        new_rows: Initial values for tokens that the files have no row for; None: that is an error.

    Returns:
        Names of the task's own heads that the folder has not, or over other labels: they stay as
        they are.

    Raises:
        DataError: A file or a tensor is missing, damaged, or of another shape.
    """
    stored = _stored(folder)
    params = {name: each for name, each in model.named_parameters() if not is_adapter(name)}
    tensors = file_tensors({name: param.shape for name, param in params.items()}, family)
    found = stored_names(stored, tensors, family)
    for name in _of_other_labels(stored, tensors, found, family):
        del found[name]
    names, wanted = list(tensors), _local_slices(tensors, params)
    lacking = {name for name in names if name not in found}
    drawn = {name for name in lacking if name.startswith(family.drawn_modules)}
    missing = sorted(lacking - drawn)
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of the model's {len(names)} tensors, the first is "
            f"{missing[0]}. It holds weights of another model, or only a part of them; check "
            "config.json against the safetensors files."
        )
    by_file: dict[Path, list[str]] = {}
    for name in wanted.keys() - drawn:
        by_file.setdefault(stored[found[name]].file, []).append(name)
    by_token = [found[name] for name in rows_by_token(family) if name in found]
    if len({stored[name].shape[0] for name in by_token}) > 1:
        by_token = []  # damaged: the table and the head differ
    for file, names in by_file.items():
        slices = {found[name]: wanted[name] for name in names}
        _read_file(file, slices, by_token=by_token, new_rows=new_rows)
    return drawn


def _of_other_labels(
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, tuple[ParameterPiece, ...]],
    found: Mapping[str, str],
    family: Family,
) -> list[str]:
    """Names of a head over labels where the folder's has another number of them."""
    if family.labelled is None:
        return []
    head = [name for name in found if name.startswith(f"{family.head.module}.")]
    differs = any(stored[found[name]].shape != whole_shape(tensors[name]) for name in head)
    return head if differs else []


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Fill adapters in place from a folder in PEFT's format: all that have storage.

    With them come the modules that are trained next to them.

    Raises:
        DataError: A tensor is missing, or of another shape.
    """
    params = {name: each for name, each in model.named_parameters() if each.requires_grad}
    tensors = {
        f"{PREFIX}{name}": (ParameterPiece(name, tuple(param.shape)),)
        for name, param in params.items()
    }
    _read_file(folder / WEIGHTS, _local_slices(tensors, params))


def piece_in(tensor: Tensor, piece: ParameterPiece) -> Tensor:
    """A parameter's part of a tensor of the files."""
    ours = tensor.mT if piece.is_transposed else tensor
    return ours[piece.offset : piece.offset + piece.shape[0]]


@dataclass(frozen=True)
class _LocalSlice:
    """Part of a tensor of the files that this rank holds, and its place in the whole."""

    parameter: str
    tensor: Tensor
    slices: tuple[slice, ...]
    whole_shape: tuple[int, ...]


def _local_slices(
    tensors: Mapping[str, tuple[ParameterPiece, ...]], params: Mapping[str, nn.Parameter]
) -> dict[str, list[_LocalSlice]]:
    """By name in the files; what this rank has no part of is left out."""
    by_name: dict[str, list[_LocalSlice]] = {}
    for name, pieces in tensors.items():
        for piece in pieces:
            shard = local_shard(params[piece.parameter])
            if shard.tensor.is_meta:
                continue
            if piece.expert is not None:
                here = piece.expert - shard.offsets[0]
                if not 0 <= here < shard.tensor.shape[0]:
                    continue
                shard = LocalShard(shard.tensor[here], shard.offsets[1:], piece.shape)
            rows, *others = shard.slices
            slices: tuple[slice, ...] = (
                slice(rows.start + piece.offset, rows.stop + piece.offset),
                *others,
            )
            tensor = shard.tensor
            if piece.is_transposed:
                tensor, slices = tensor.mT, slices[::-1]
            held = _LocalSlice(piece.parameter, tensor, slices, whole_shape(pieces))
            by_name.setdefault(name, []).append(held)
    return by_name


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder; problems of its files were reported before training."""
    try:
        return read_weight_files(folder)
    except RequestError as error:
        raise DataError(str(error)) from error


def _read_file(
    path: Path,
    slices: Mapping[str, Sequence[_LocalSlice]],
    *,
    by_token: Container[str] = (),
    new_rows: NewRows | None = None,
) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name, parts in slices.items():
                source = file.get_slice(name)
                for part in parts:
                    if new_rows is not None and name in by_token:
                        part = _without_new_rows(source, part, new_rows)
                    _read(source, part, f"{path}: tensor {name}")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _without_new_rows(source: Any, part: _LocalSlice, new_rows: NewRows) -> _LocalSlice:
    """Fill the rows that the tensor in the file lacks, and return the part that it has."""
    (rows, *width), (wanted, *others) = source.get_shape(), part.whole_shape
    if rows >= wanted or width != others:
        return part
    shard = LocalShard(part.tensor, tuple(each.start for each in part.slices), part.whole_shape)
    old, new = split_new_rows(shard, rows)
    new_rows.fill(part.parameter, new, source)
    return _LocalSlice(part.parameter, old.tensor, old.slices, old.whole_shape)


def _read(source: Any, part: _LocalSlice, where: str) -> None:
    if tuple(source.get_shape()) != part.whole_shape:
        raise DataError(
            f"{where} has shape {list(source.get_shape())}, the model needs "
            f"{list(part.whole_shape)}. Check config.json of the folder."
        )
    if part.tensor.numel():
        part.tensor.copy_(source[part.slices].to(torch.float32))


def _damaged(path: Path, error: Exception) -> DataError:
    try:
        why = content_error(path)
    except OSError:
        why = None
    return DataError(f"{path} {why or f'cannot be read: {error}. Fetch the file again.'}")
