"""Weight files of a Hugging Face folder, by their headers: the tensors, and what is wrong.

No tensor is read and torch is not needed, so this runs before anything is planned or
started. The files are those that transformers opens: model.safetensors, else what the index
names. The headers say which tensor is in which file, as transformers takes it, and the
index is checked against them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shardyard.errors import JsonFileError, RequestError
from shardyard.file_faults import content_error
from shardyard.io.digests import StoredTensor, read_header
from shardyard.io.files import read_json_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_SHOWN = 4


@dataclass(frozen=True)
class _Listed:
    """Content of an index."""

    files: tuple[str, ...]
    weight_map: Mapping[str, str]


def has_weight_files(folder: Path) -> bool:
    """Whether a folder names weights in safetensors, even by a link that leads nowhere."""
    return any((folder / name).exists() or (folder / name).is_symlink() for name in (SINGLE, INDEX))


def read_weight_files(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all weight files of a folder.

    Returns:
        Name of each tensor -> dtype, shape and place.

    Raises:
        RequestError: Files are missing, damaged, no weights, or outside of the folder; all of them.
    """
    stored: dict[str, StoredTensor] = {}
    errors: list[str] = []
    if (folder / ADAPTER).is_file():
        errors.append(
            f"{folder / ADAPTER}: the folder holds an adapter next to weights, and transformers "
            "would add it to them. Merge it first (peft: merge_and_unload(), save_pretrained()), "
            "or move the adapter's files out."
        )
    try:
        listed = _listed(folder)
    except _InvalidFileError as error:
        raise _request_error(folder, [*errors, str(error)]) from error
    for name in listed.files:
        try:
            tensors = _tensors_of(folder, name)
        except _InvalidFileError as error:
            errors.append(str(error))
            continue
        twice = sorted(stored.keys() & tensors.keys())
        if twice:
            others = sorted({stored[each].file.name for each in twice})
            errors.append(
                f"{folder / name} has {_count(twice, 'tensor')} that {', '.join(others)} "
                f"{'has' if len(others) == 1 else 'have'} too: {format_names(twice)}. Which one "
                "counts is unknown; fetch or save the folder again."
            )
        stored |= tensors
    lacking = sorted(listed.weight_map.keys() - stored.keys())
    if lacking and not errors:
        errors.append(
            f"{folder / INDEX} names {_count(lacking, 'tensor')} that its files do not have: "
            f"{format_names(lacking)}. Fetch or save the folder again."
        )
    if errors:
        raise _request_error(folder, errors)
    return stored


def format_names(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


class _InvalidFileError(Exception):
    """A file is not what it should be; the text says which and why."""


def _request_error(folder: Path, errors: list[str]) -> RequestError:
    if len(errors) == 1:
        return RequestError(errors[0])
    lines = "\n".join(f"  {problem}" for problem in errors)
    return RequestError(f"{folder} has {len(errors)} problems:\n{lines}")


def _count(names: list[str], what: str) -> str:
    return f"{len(names):,} {what}{'s' * (len(names) > 1)}"


def _listed(folder: Path) -> _Listed:
    """The weight files by name, in transformers' order of preference."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() or not index.is_file():
        is_named = single.is_file() or single.is_symlink() or not index.is_symlink()
        if is_named:
            return _Listed((SINGLE,), {})
    _check_content(index)
    try:
        weight_map = read_json_object(index)["weight_map"]
    except JsonFileError as error:
        raise _InvalidFileError(f"{error} Fetch or save it again.") from error
    except KeyError as error:
        raise _InvalidFileError(
            f"{index} is not an index of weights: it has no weight_map in JSON. Fetch or save it "
            "again."
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise _InvalidFileError(
            f"{index}: weight_map names no tensors. Fetch or save the folder again."
        )
    wrong = list(_invalid_names(weight_map))
    if wrong:
        raise _InvalidFileError(f"{index}: {'; '.join(wrong)}. Fetch or save the folder again.")
    return _Listed(tuple(sorted(set(weight_map.values()))), weight_map)


def _invalid_names(weight_map: Mapping[str, object]) -> Iterator[str]:
    """Why entries of an index can be no files of its folder, each kind of entry once."""
    for file in {repr(each): each for each in weight_map.values()}.values():
        if not isinstance(file, str):
            yield f"weight_map has {json.dumps(file)[:80]} where the name of a file should be"
            continue
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file or not file:
            yield f"weight_map names {file!r}, which is outside of the folder"
        elif path.suffix != ".safetensors":
            yield (
                f"weight_map names {file!r}, which is not a .safetensors file; opening another "
                "kind may run code"
            )


def _tensors_of(folder: Path, name: str) -> dict[str, StoredTensor]:
    path = folder / name
    _check_content(path)
    if not path.is_file():
        if name == SINGLE and not (folder / INDEX).exists():
            raise _InvalidFileError(
                f"{folder} holds no {SINGLE} and no {INDEX}. Weights in pickle files (.bin, .pt) "
                "are not opened, as opening one runs code. Convert them with transformers' "
                "save_pretrained, or set model.weights=random."
            )
        raise _InvalidFileError(
            f"{path} is missing, and {INDEX} names it. Fetch or copy the folder again."
        )
    try:
        return read_header(path)
    except OSError as error:
        raise _InvalidFileError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise _InvalidFileError(f"{path} {error}. Fetch or save it again.") from error


def _check_content(path: Path) -> None:
    try:
        why = content_error(path)
    except OSError as error:
        raise _InvalidFileError(f"{path} cannot be read: {error.strerror}.") from error
    if why is not None:
        raise _InvalidFileError(f"{path} {why}")
