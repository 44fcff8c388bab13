"""The weights as a Hugging Face folder, which is there whole or not at all."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardyard.errors import RequestError, StorageError
from shardyard.importers.checkpoints.reference_model import CONFIG, INDEX, ReferenceModel
from shardyard.importers.checkpoints.tensors import TensorView, blocks, can_be_copied, copy
from shardyard.io.digests import ITEM_BYTES, header
from shardyard.io.files import publish_folder

MAX_SHARD_BYTES = 5 * 10**9
"""Size of one weights file, unless a single tensor is larger; as ``export`` writes them."""

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtype in config.json -> dtype in safetensors."""

_NOT_COPIED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""A kernel says so of file systems between which it does not copy."""

ORIGIN = "imported.json"
"""File with the origin of the weights, and what of the checkpoint is not in the folder."""


def split_into_shards(
    tensors: Mapping[str, TensorView], dtype: str | None, most_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[str]]:
    """Name of each weights file -> its tensors."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        own = tensor.elements * ITEM_BYTES[dtype or tensor.dtype]
        if groups[-1] and size + own > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    last = len(groups)
    return {
        f"model-{number:05d}-of-{last:05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def write_folder(
    to: Path,
    tensors: Mapping[str, TensorView],
    like: ReferenceModel,
    origin: Mapping[str, Any],
    *,
    dtype: str | None,
    on_progress: Callable[[int], None],
    most_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write the folder next to its target, and rename it when it is complete.

    Args:
        dtype: Dtype of all weights, as safetensors names it; None: each as it was.
        on_progress: Called with the bytes written since its last call.

    Returns:
        Names of the files of weights.

    Raises:
        RequestError: The folder exists already.
        StorageError: The file system reported an error.
    """
    if to.exists():
        raise RequestError(f"{to} exists already. Name another folder with --to, or remove it.")
    scratch = to.with_name(f".{to.name}.importing")
    files = split_into_shards(tensors, dtype, most_bytes)
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of a call that was killed
        scratch.mkdir(parents=True)
        for file, names in files.items():
            _write_weights(
                scratch / file, {name: tensors[name] for name in names}, dtype, on_progress
            )
        if len(files) > 1:
            _write_json(scratch / INDEX, _index(files, tensors, dtype))
        for name, source in like.copied.items():
            shutil.copyfile(source, scratch / name)
        _write_json(scratch / CONFIG, _config(like, tensors, dtype))
        _write_json(scratch / ORIGIN, dict(origin))
        publish_folder(scratch, to)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise StorageError(
            f"{to} cannot be written: {error.strerror or error}. Check that the folder above it is "
            "yours and has room (`df -h`), or name another with --to."
        ) from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return list(files)


def _write_weights(
    path: Path,
    tensors: Mapping[str, TensorView],
    dtype: str | None,
    on_progress: Callable[[int], None],
) -> None:
    written = {name: (dtype or each.dtype, each.shape) for name, each in tensors.items()}
    # wide elements first: then every tensor is aligned to its element
    order = sorted(written, key=lambda name: (-ITEM_BYTES[written[name][0]], name))
    with path.open("wb", buffering=0) as file:
        file.write(header({name: written[name] for name in order}, {"format": "pt"}))
        for name in order:
            for count in _written(file, tensors[name], written[name][0]):
                on_progress(count)


def _written(file: Any, tensor: TensorView, dtype: str) -> Iterator[int]:
    """Write a tensor; how many bytes, again and again."""
    begin = file.tell()
    if can_be_copied(tensor, dtype):
        try:
            yield from copy(tensor, file.fileno())
        except OSError as error:
            if error.errno not in _NOT_COPIED or file.tell() != begin:
                raise
        else:
            return
    for block in blocks(tensor, dtype):
        left = block
        while left:
            left = left[file.write(left) :]
        yield len(block)


def _index(
    files: Mapping[str, list[str]], tensors: Mapping[str, TensorView], dtype: str | None
) -> dict[str, Any]:
    sizes = (each.elements * ITEM_BYTES[dtype or each.dtype] for each in tensors.values())
    places = {name: file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(places.items()))}


def _config(
    like: ReferenceModel, tensors: Mapping[str, TensorView], dtype: str | None
) -> dict[str, Any]:
    """The folder's config.json, with the dtype that the weights have now."""
    kinds = {dtype or each.dtype for each in tensors.values()}
    names = [word for word, kind in DTYPES.items() if kinds == {kind}]
    key = "torch_dtype" if "torch_dtype" in like.config else "dtype"
    return {**like.config, **({key: names[0]} if names else {})}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
