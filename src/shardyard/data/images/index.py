"""Index of the pictures of a prepared dataset: the files in its folder.

manifest.json       written last: without it there is no dataset
train.index.npy     a row for each picture: which part, offset, size, label
train.names.npy     names of the pictures in the source, in bytes of one length; of pictures
                    that stay in files of their own, their paths
eval.index.npy ...  the validation split, likewise
train-00000.tar     packed pictures, as webdataset has them: 00000-000000.jpg, 00000-000000.cls
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.config.resolved import DatasetMetadata
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.order import Window
from shardyard.data.shards import IMAGES_VERSION, check_sizes, damaged, read_manifest

ROW = np.dtype([("offset", "<i8"), ("size", "<u4"), ("label", "<i4"), ("part", "<i4")])
OWN_FILE = -1
"""Part of a picture that is a file by itself."""

Rows = npt.NDArray[Any]
"""Array of ``ROW``."""


def index_name(split: str) -> str:
    return f"{split}.index.npy"


def names_name(split: str) -> str:
    return f"{split}.names.npy"


@dataclass(frozen=True)
class ImageLocation:
    """Range of bytes in a file."""

    file: SourceFile
    offset: int
    size: int


class ImageIndex:
    """One split of a prepared data set; rows are mapped into memory. Safe in several threads."""

    def __init__(self, folder: Path, split: str) -> None:
        """Open ``train`` or ``eval``.

        Raises:
            DataError: The data set is missing, incomplete or damaged.
        """
        manifest = read_manifest(folder, (IMAGES_VERSION,))
        about = manifest["splits"][split]
        self.folder = folder
        self.split = split
        self.classes: list[str] = manifest["classes"]
        self.num_samples: int = about["samples"]
        self.size_bytes: int = about["bytes"]
        self.window = Window(**manifest["window"])
        self.rows: Rows = _mapped(folder / index_name(split), self.num_samples)
        self._names = _mapped(folder / names_name(split), self.num_samples)
        self._parts = [self._part(part) for part in about["parts"]]

    def location(self, sample: int) -> ImageLocation:
        """Return the place of a picture's bytes."""
        row = self.rows[sample]
        part, size = int(row["part"]), int(row["size"])
        if part == OWN_FILE:
            path = self.name(sample)
            return ImageLocation(SourceFile(path, path, "", size, 0), 0, size)
        return ImageLocation(self._parts[part], int(row["offset"]), size)

    def name(self, sample: int) -> str:
        """Return the name of a picture in the source."""
        return os.fsdecode(bytes(self._names[sample]))

    def describe(self, sample: int) -> str:
        """A picture in words, for messages."""
        name = escape_text(self.name(sample))
        part = int(self.rows[sample]["part"])
        if part == OWN_FILE or not self._is_packed[part]:
            return name
        path = self._parts[part].path
        return f"{name} (packed at byte {int(self.rows[sample]['offset']):,} of {path})"

    def part(self, number: int) -> SourceFile:
        """A shard by its number in rows."""
        return self._parts[number]

    @cached_property
    def is_remote(self) -> bool:
        """Whether some of it is read over a network."""
        return any("://" in part.path for part in self._parts)

    @cached_property
    def _is_packed(self) -> list[bool]:
        return [Path(part.path).parent == self.folder for part in self._parts]

    def _part(self, about: dict[str, Any]) -> SourceFile:
        path = about["path"] or str(self.folder / about["name"])
        return SourceFile(path, path, "tar", about["bytes"], about["version"])


def read_metadata(folder: Path) -> DatasetMetadata:
    """Return what a prepared dataset holds; compare the sizes of all files with the manifest.

    Raises:
        DataError: The dataset is missing or incomplete, or a file has another size.
    """
    manifest = read_manifest(folder, (IMAGES_VERSION,))
    check_sizes(folder, manifest, manifest["files"])
    splits = manifest["splits"]
    return DatasetMetadata(
        dir=str(folder),
        fingerprint=manifest["fingerprint"],
        vocab_size=0,
        train_tokens=0,
        eval_tokens=0,
        train_documents=0,
        eval_documents=0,
        unigram_entropy=0.0,
        num_classes=len(manifest["classes"]),
        train_bytes=splits["train"]["bytes"],
        eval_bytes=splits["eval"]["bytes"],
        train_samples=splits["train"]["samples"],
        eval_samples=splits["eval"]["samples"],
    )


def _mapped(path: Path, rows: int) -> npt.NDArray[Any]:
    try:
        found = np.load(path, mmap_mode="r" if rows else None, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise damaged(path, f"it is not an array ({error})") from error
    if len(found) != rows:
        raise damaged(path, f"it has {len(found):,} rows, the manifest says {rows:,}")
    return np.asarray(found)  # one row of numpy's own memmap takes ten times as long
