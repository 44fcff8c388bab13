"""Load weights from a Hugging Face folder: each rank reads only the slices it holds."""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardyard.errors import DataError
from shardyard.families.family import Family, Row
from shardyard.families.lora import is_adapter
from shardyard.models.local_shard import LocalShard, local_shard


@dataclass(frozen=True)
class Piece:
    """A parameter, or one expert of it, in a tensor of Hugging Face's files."""

    parameter: str
    shape: tuple[int, ...]
    """Ours, of one expert where it is one."""
    expert: int | None = None
    offset: int = 0
    """Rows of the tensor that come before, being of other parameters."""
    is_transposed: bool = False
    """The tensor has a column where we have a row."""

    def of(self, tensor: Tensor) -> Tensor:
        """Out of the tensor of the files."""
        ours = tensor.mT if self.is_transposed else tensor
        return ours[self.offset : self.offset + self.shape[0]]


def file_tensors(
    shapes: Mapping[str, Sequence[int]], family: Family
) -> dict[str, tuple[Piece, ...]]:
    """Names in Hugging Face's files, and what of our parameters each tensor is made of.

    Args:
        shapes: Of whole parameters, by our names.
    """
    found: dict[str, tuple[Piece, ...]] = {}
    begin, ends = f"{family.blocks}.", (*family.before, *family.after)
    renamed = {f"{row.module}.{row.parameter}": row.in_files for row in ends if row.in_files}
    for block, group in groupby(shapes, key=lambda name: _block_of(name, begin)):
        names = list(group)
        if block is None:
            for name in names:
                found[renamed.get(name, name)] = (Piece(name, tuple(shapes[name])),)
            continue
        prefix = f"{begin}{block}."
        inside = {name.removeprefix(prefix): shapes[name] for name in names}
        for in_files, pieces in pieces_in_block(inside, family).items():
            found[f"{prefix}{in_files}"] = tuple(
                replace(piece, parameter=f"{prefix}{piece.parameter}") for piece in pieces
            )
    return found


def pieces_in_block(
    shapes: Mapping[str, Sequence[int]], family: Family
) -> dict[str, tuple[Piece, ...]]:
    """The same in one block, by names from its top."""
    rows = {f"{row.module}.{row.parameter}": row for row in family.block}
    found: dict[str, list[Piece]] = {}
    for name, sizes in shapes.items():
        module, _, kind = name.rpartition(".")
        row = rows.get(name) or rows.get(f"{module}.weight")
        shape = tuple(sizes)
        if row is None:
            found[name] = [Piece(name, shape)]
        elif row.per_expert and row.in_files is not None:
            for expert in range(shape[0]):
                piece = Piece(name, shape[1:], expert)
                found[row.in_files.format(expert)] = [piece]
        else:
            in_files = name if row.fused is None else f"{row.fused.module}.{kind}"
            is_transposed = row.is_transposed and kind == row.parameter
            piece = Piece(name, shape, is_transposed=is_transposed)
            found.setdefault(row.in_files or in_files, []).append(piece)
    return {in_files: _stacked(pieces, rows) for in_files, pieces in found.items()}


def _stacked(pieces: list[Piece], rows: Mapping[str, Row]) -> tuple[Piece, ...]:
    """Pieces in the order in which their tensor has them."""
    if len(pieces) == 1:
        return tuple(pieces)

    def place(piece: Piece) -> int:
        module = piece.parameter.rpartition(".")[0]
        fused = rows[f"{module}.weight"].fused
        assert fused is not None, "several in one tensor"
        return fused.parts.index(module.rpartition(".")[2])

    found, offset = [], 0
    for piece in sorted(pieces, key=place):
        found.append(replace(piece, offset=offset))
        offset += piece.shape[0]
    return tuple(found)


def whole_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Of the tensor in the files."""
    ours = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    return ours[::-1] if pieces[0].is_transposed else ours


def _block_of(name: str, begin: str) -> str | None:
    return name.removeprefix(begin).partition(".")[0] if name.startswith(begin) else None


def load_weights(model: nn.Module, folder: Path, family: Family) -> set[str]:
    """Fill parameters in place from the folder's safetensors files: all that have storage, and are
    no adapters.

    Returns:
        Names of what judges pairs, where the folder has none of it: it stays as it is.

    Raises:
        DataError: A file or a tensor is missing, damaged, or of another shape.
    """
    file_of = _tensor_files(folder)
    params = {name: each for name, each in model.named_parameters() if not is_adapter(name)}
    tensors = file_tensors({name: param.shape for name, param in params.items()}, family)
    stored = {_as_now(name, family, tensors): name for name in file_of}
    file_of |= {now: file_of[name] for now, name in stored.items() if now not in file_of}
    names, wanted = list(tensors), _held(tensors, params)
    lacking = {name for name in names if name not in file_of}
    of_pairs = {name for name in lacking if name.startswith(family.modules_of_pairs)}
    missing = sorted(lacking - of_pairs)
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of the model's {len(names)} tensors, the first is "
            f"{missing[0]}. It holds weights of another model, or only a part of them; check "
            "config.json against the safetensors files."
        )
    by_file: dict[Path, list[str]] = {}
    for name in wanted.keys() - of_pairs:
        by_file.setdefault(file_of[name], []).append(name)
    for file, names in by_file.items():
        _read_file(file, {stored[name]: wanted[name] for name in names})
    return of_pairs


def _as_now(name: str, family: Family, wanted: Container[str]) -> str:
    """What a name in a file of another version, or of a model without its head, is now."""
    for older, now in family.other_names.items():
        if name.endswith(older):
            return name.removesuffix(older) + now
    below_head = f"{family.blocks.partition('.')[0]}.{name}"
    return below_head if below_head in wanted else name


@dataclass(frozen=True)
class _Held:
    """What this rank holds of a tensor of the files, and where it is there."""

    tensor: Tensor
    slices: tuple[slice, ...]
    whole_shape: tuple[int, ...]


def _held(
    tensors: Mapping[str, tuple[Piece, ...]], params: Mapping[str, nn.Parameter]
) -> dict[str, list[_Held]]:
    """By name in the files; what this rank has no part of is left out."""
    found: dict[str, list[_Held]] = {}
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
            held = _Held(tensor, slices, whole_shape(pieces))
            found.setdefault(name, []).append(held)
    return found


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


def _read_file(path: Path, held: Mapping[str, Sequence[_Held]]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name, parts in held.items():
                source = file.get_slice(name)
                for part in parts:
                    _read(source, part, f"{path}: tensor {name}")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _read(source: Any, part: _Held, where: str) -> None:
    if tuple(source.get_shape()) != part.whole_shape:
        raise DataError(
            f"{where} has shape {list(source.get_shape())}, the model needs "
            f"{list(part.whole_shape)}. Check config.json of the folder."
        )
    if part.tensor.numel():
        part.tensor.copy_(source[part.slices].to(torch.float32))


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read: {error}. Fetch the file again.")
