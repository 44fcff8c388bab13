"""A folder of torch.distributed.checkpoint: FSDP2, FSDP1's sharded state dicts, torchtitan.

Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py`` of torch 2.13: ``.metadata`` is a
pickle that says which stretch of which ``.distcp`` file each part of a tensor is; each stretch is a
file of torch.save.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from shardyard.errors import CheckpointError
from shardyard.importers.checkpoints.pickles import PickledObject, load, loads
from shardyard.importers.checkpoints.tensors import (
    STEPS,
    SourceCheckpoint,
    TensorChunk,
    TensorView,
    step_in,
    top_level_names,
)

METADATA = ".metadata"
_TENSOR, _BYTES = "TensorStorageMetadata", "BytesStorageMetadata"


def read(folder: Path) -> SourceCheckpoint:
    """Return the content of the folder.

    Raises:
        CheckpointError: It is damaged, or in a form that is not known.
        OSError: A file cannot be read.
    """
    file = folder / METADATA
    described = loads(file.read_bytes(), str(file))
    try:
        names: Mapping[str, PickledObject] = described.state["state_dict_metadata"]
        places = {
            (key.state["fqn"], key.state.get("offset")): value.state
            for key, value in described.state["storage_data"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} does not say where tensors are ({type(error).__name__}: {error}): it was "
            "written by another storage than torch's own files, or is damaged."
        ) from error
    tensors: dict[str, TensorView] = {}
    loose: dict[str, Any] = {}
    for name, entry in names.items():
        kind = entry.name.rpartition(".")[2]
        if kind == _TENSOR:
            tensors[name] = _tensor(folder, name, entry, places)
        elif kind == _BYTES and name.rpartition(".")[2] in STEPS:
            loose[name] = _value(folder, places[name, None])
        elif kind == _BYTES:
            loose[name] = None
        else:
            raise CheckpointError(f"{file}: {name} is a {kind}, which torch 2.13 does not write.")
    if not tensors:
        raise CheckpointError(f"{folder} holds no tensors, so it is not a checkpoint of a model.")
    beside = top_level_names(loose) - top_level_names(tensors)
    return SourceCheckpoint(
        format="torch.distributed.checkpoint",
        path=folder,
        tensors=tensors,
        step=step_in(loose | _numbers(tensors)),
        other_state=tuple(sorted(beside - {*STEPS, "epoch"})),
    )


def _tensor(
    folder: Path, name: str, entry: PickledObject, locations: Mapping[Any, Any]
) -> TensorView:
    state = entry.state
    shape = tuple(state["size"])
    dtype = None
    pieces = []
    for chunk in state["chunks"]:
        at, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        where = locations.get((name, at), locations.get((name, None)))
        if where is None:
            raise CheckpointError(f"{folder}: {name} has a part at {at} that no file holds.")
        held = _part(folder, where)
        if held.shape != sizes or dtype not in (None, held.dtype):
            raise CheckpointError(
                f"{folder}: the part of {name} at {at} is {held.shape} in {held.dtype}, where "
                f"{METADATA} says {sizes}. Files of two checkpoints are mixed in this folder."
            )
        dtype = held.dtype
        pieces.append(replace(held.pieces[0], at=at))
    if dtype is None:
        raise CheckpointError(f"{folder}: {name} has no parts.")
    return TensorView(dtype=dtype, shape=shape, pieces=tuple(pieces))


def _part(folder: Path, where: Mapping[str, Any]) -> TensorView:
    if where.get("transform_descriptors"):
        raise CheckpointError(f"{folder}: its files are compressed, which is not read here.")
    held = load(_file(folder, where), first_byte=where["offset"], length=where["length"])
    if not isinstance(held, TensorView):
        raise CheckpointError(
            f"{folder}: {where['relative_path']} holds no tensor where one is due."
        )
    return held


def _value(folder: Path, where: Mapping[str, Any]) -> Any:
    return load(_file(folder, where), first_byte=where["offset"], length=where["length"])


def _file(folder: Path, where: Mapping[str, Any]) -> Path:
    relative = PurePosixPath(str(where["relative_path"]))
    if relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"{folder}: {METADATA} leads out of the folder, to {relative}.")
    file = folder / relative
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing: {METADATA} names it. Copy the files of all nodes into one folder."
        )
    return file


def _numbers(tensors: Mapping[str, TensorView]) -> dict[str, int]:
    """Steps that are tensors of one element."""
    found = {}
    for name, tensor in tensors.items():
        is_step = name.rpartition(".")[2] in STEPS and "." not in name
        if is_step and tensor.dtype == "I64" and tensor.elements == 1:
            found[name] = _integer(tensor.pieces[0])
    return found


def _integer(piece: TensorChunk) -> int:
    with piece.file.open("rb") as file:
        file.seek(piece.first_byte)
        return int.from_bytes(file.read(8), "little", signed=True)
