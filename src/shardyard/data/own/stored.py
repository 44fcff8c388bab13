"""Items of a dataset that can only be iterated, written once and then read by their numbers.

SPLIT.FIELD.bin        the arrays of all items, one after the other, little-endian
SPLIT.FIELD.idx.npy    where each begins, int64, in rows of its first dimension
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shardyard.data.own.items import Fields
from shardyard.data.shards import damaged
from shardyard.errors import SourceError


def write_items(
    folder: Path, split: str, items: Iterable[Fields]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Write the items of a split; they have the same fields, of any length.

    Returns:
        What ``StoredItems`` needs to know, and size and SHA-256 of each file, by its name.

    Raises:
        SourceError: There is no item.
        OSError: A file cannot be written.
    """
    columns: dict[str, _Column] = {}
    with ExitStack() as files:
        samples = 0
        for fields in items:
            samples += 1
            for name, array in fields.items():
                if name not in columns:
                    path = folder / f"{split}.{name}.bin"
                    columns[name] = _Column(files.enter_context(path.open("wb")), array)
                columns[name].append(array)
    if not samples:
        raise SourceError(f"data.module: the {split} split has no items. Return a dataset of some.")
    entries: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        np.save(folder / f"{split}.{name}.idx.npy", np.array(column.starts, dtype=np.int64))
        for suffix in ("bin", "idx.npy"):
            path = folder / f"{split}.{name}.{suffix}"
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
    kinds = {name: [column.dtype, column.tail] for name, column in columns.items()}
    return {"samples": samples, "fields": kinds}, entries


class StoredItems:
    """The items that ``write_items`` wrote, mapped into memory."""

    def __init__(self, folder: Path, split: str, content: Mapping[str, Any]) -> None:
        """Args:
            content: What ``write_items`` returned.

        Raises:
            DataError: A file is missing or damaged.
        """
        self._samples = int(content["samples"])
        self._columns: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64], bool]] = {}
        for name, (dtype, tail) in content["fields"].items():
            path = folder / f"{split}.{name}.bin"
            try:
                flat = np.memmap(path, dtype=np.dtype(dtype), mode="r")
                starts = np.load(folder / f"{split}.{name}.idx.npy", allow_pickle=False)
                rows = flat if tail is None else flat.reshape(-1, *tail)
            except (OSError, ValueError) as error:
                raise damaged(path, f"it cannot be mapped into memory ({error})") from error
            self._columns[name] = (rows, starts, tail is None)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Fields:
        found = {}
        for name, (rows, starts, is_number) in self._columns.items():
            array = np.array(rows[starts[index] : starts[index + 1]])
            found[name] = array.reshape(()) if is_number else array
        return found


class _Column:
    """One field of all items, as it is written."""

    def __init__(self, file: IO[bytes], first: npt.NDArray[Any]) -> None:
        self.dtype = first.dtype.newbyteorder("<").str
        self.tail = None if first.ndim == 0 else list(first.shape[1:])
        """Shape of a row; None: each item is a number."""
        self.starts = [0]
        self._file = file

    def append(self, array: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(array, dtype=self.dtype).tobytes())
        self.starts.append(self.starts[-1] + (1 if array.ndim == 0 else len(array)))
