"""One part of the source becomes an index, and packed shards: the unit of parallel and resumable
work, as ``data/work_units.py`` is for text. A piece is finished when its record exists.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardyard.data.byte_ranges import escape_text
from shardyard.data.images.decode import check
from shardyard.data.images.image_iter import SourceImage
from shardyard.data.images.index import ROW
from shardyard.data.images.tar import TarWriter
from shardyard.data.work_units import SCRATCH, SPLITS, ValidationRule, cannot_write, write_file
from shardyard.errors import SourceError
from shardyard.io.files import flush_folder, read_json_object

_MOST_TOLD = 5
_MOST_KEPT = 1_000
"""Most broken pictures of a piece that are reported by name."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options for preparing pictures."""

    hold_out: ValidationRule
    packs: bool
    """Whether they are written into shards of ours."""
    checks: bool
    """Whether each is read to its end."""
    leaves_out: bool
    """Whether broken ones are left out, and listed; else they are rejected."""


@dataclass(frozen=True)
class ImagePiece:
    """The task of doing one part of the source."""

    folder: Path
    number: int
    read: Callable[[], Iterator[SourceImage]]
    """Its pictures; can be sent to another process."""
    words: str
    """Description of the piece, for messages."""
    size_bytes: int
    options: ImageOptions

    @property
    def record_path(self) -> Path:
        return self.folder / SCRATCH / f"{self.number:05d}.json"

    def array_path(self, split: str, what: str) -> Path:
        """Return the path of its rows or names, used until all pieces are finished."""
        return self.folder / SCRATCH / f"{self.number:05d}.{split}.{what}.npy"

    def __str__(self) -> str:
        return self.words

    def finished(self) -> dict[str, Any] | None:
        """The record of this very piece if it is finished."""
        try:
            record = read_json_object(self.record_path)
        except (FileNotFoundError, ValueError):
            return None
        return record if record["hold_out"] == asdict(self.options.hold_out) else None

    def __call__(self) -> None:
        """Write shards, rows and names, and, last, the record.

        Raises:
            SourceError: A picture or a shard is broken.
            StorageError: The file system rejected a write.
        """
        self.record_path.unlink(missing_ok=True)  # of an earlier rule
        builders = {split: _SplitBuilder(self, split) for split in SPLITS}
        for builder in builders.values():
            (self.folder / builder.name).unlink(missing_ok=True)
        try:
            record = self._fill(builders)
            splits = {s: builder.close() for s, builder in builders.items() if builder.rows}
        finally:
            for builder in builders.values():
                builder.discard()
        flush_folder(self.folder)
        content = json.dumps({**record, "splits": splits}).encode()
        write_file(self.record_path, content, folder=self.folder)

    def _fill(self, builders: "dict[str, _SplitBuilder]") -> dict[str, Any]:
        broken: list[str] = []
        hashes: list[int] = []
        classes = _Classes()
        options = self.options
        for image in self.read():
            suffix = "jpg"
            if options.checks:
                try:
                    suffix = check(image.content, escape_text(image.name))
                except SourceError as error:
                    broken.append(str(error))
                    continue
            number = classes.number_of(image)
            digest = hashlib.blake2b(image.content, digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "big"))
            split = image.split or options.hold_out.split_of(hashes[-1])
            builders[split].add(image, number, suffix)
        if broken and not options.leaves_out:
            raise _broken(broken)
        return {
            "hold_out": asdict(options.hold_out),
            "hashes": [min(hashes), max(hashes)] if hashes else [],
            "classes": classes.labels,
            "num_broken": len(broken),
            "broken": broken[:_MOST_KEPT],
        }


@dataclass
class _Classes:
    """Classes in the order in which a piece meets them."""

    labels: list[tuple[int | str, str | None]] = field(default_factory=list)
    _numbers: dict[int | str, int] = field(default_factory=dict)

    def number_of(self, image: SourceImage) -> int:
        number = self._numbers.setdefault(image.label, len(self.labels))
        if number == len(self.labels):
            self.labels.append((image.label, image.class_name))
        return number


class _SplitBuilder:
    """Rows of one split of a piece, and its shard."""

    def __init__(self, piece: ImagePiece, split: str) -> None:
        self._piece = piece
        self._split = split
        self.name = f"{split}-{piece.number:05d}.tar"
        self._scratch = piece.folder / SCRATCH / f"{self.name}.{os.getpid()}"
        self._file: _HashedFile | None = None
        self._tar: TarWriter | None = None
        self._contents = hashlib.sha256()
        self.rows: list[tuple[int, int, int, int]] = []
        self._names: list[bytes] = []

    def add(self, image: SourceImage, label: int, suffix: str) -> None:
        offset = image.offset
        if self._piece.options.packs:
            offset = self._pack(image, suffix)
        else:
            self._contents.update(image.content)
        self.rows.append((offset, len(image.content), label, 0))
        self._names.append(os.fsencode(image.name))

    def _pack(self, image: SourceImage, suffix: str) -> int:
        try:
            if self._tar is None:
                self._file = _HashedFile(self._scratch.open("wb"))
                self._tar = TarWriter(self._file.write)
            key = f"{self._piece.number:05d}-{len(self.rows):06d}"
            offset = self._tar.add(f"{key}.{suffix}", image.content)
            self._tar.add(f"{key}.cls", os.fsencode(str(image.label)))
        except OSError as error:
            raise cannot_write(self._scratch, error) from error
        return offset

    def close(self) -> dict[str, Any]:
        """Give the shard its name, and write rows and names; returns what the record says."""
        folder = self._piece.folder
        for what, array in (("rows", np.array(self.rows, ROW)), ("names", np.array(self._names))):
            path = self._piece.array_path(self._split, what)
            write_file(path, npy_bytes(array), folder=folder)
        shard = {} if self._tar is None else self._close_shard(self._tar)
        return {
            "samples": len(self.rows),
            "bytes": sum(size for _, size, _, _ in self.rows),
            "sha256": self._contents.hexdigest(),
            **shard,
        }

    def _close_shard(self, tar: TarWriter) -> dict[str, Any]:
        assert self._file is not None
        try:
            tar.close()
            self._file.close()
            self._scratch.replace(self._piece.folder / self.name)
        except OSError as error:
            raise cannot_write(self._scratch, error) from error
        sha256 = self._file.sha256.hexdigest()
        return {"shard": self.name, "file": {"bytes": tar.size_bytes, "sha256": sha256}}

    def discard(self) -> None:
        """Remove what is not whole."""
        if self._file is not None:
            self._file.close()
        self._scratch.unlink(missing_ok=True)


class _HashedFile:
    """A file that is written once, with its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.sha256.update(content)
        self._file.write(content)

    def close(self) -> None:
        """Flush to the disk."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def npy_bytes(array: Any) -> bytes:
    """An array as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _broken(messages: list[str]) -> SourceError:
    more = len(messages) - _MOST_TOLD
    rest = f"\nand {more:,} more in this part of the source" if more > 0 else ""
    return SourceError("\n".join(messages[:_MOST_TOLD]) + rest)
