"""Iterate over the pictures of a part of the source, with the label and split of each.

Of a tar shard the files of one name belong together up to the first dot of it, as
webdataset has it, in any order: ``key.jpg`` with ``key.cls`` or ``key.json``. A tar file
without any of these is read as class folders. Of Parquet files a column holds structs of
bytes and a path, as Hugging Face's datasets write them.
"""

import gzip
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from shardyard.config.sources import is_remote
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.digits import png, read_digits
from shardyard.data.images.sources import PICTURES, Split, split_word, validation_word
from shardyard.data.images.tar import Member, content_of, members
from shardyard.data.readers.read_errors import extra
from shardyard.data.stores.base import open_file
from shardyard.errors import SourceError
from shardyard.io.files import parse_json

_COPY_BYTES = 8 * 2**20
_BATCH_ROWS = 64
_AT_ONCE = 8
_LABEL_BYTES = 2**20
_KEY = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)


@dataclass(frozen=True)
class SourceImage:
    """One picture of the source, as it is there."""

    name: str
    """Path, or file and member or row: unique in the source."""
    label: int | str
    """Number of its class, or its name."""
    class_name: str | None
    """Name of the class, where the label is a number that the source has a name for."""
    split: Split | None
    """None: a hash of the picture says it."""
    content: bytes
    offset: int
    """Start of its content in its file; -1: it is not stored there as it is."""


def images_of_folders(
    files: tuple[SourceFile, ...], labels: tuple[int | str, ...], splits: tuple[Split | None, ...]
) -> Iterator[SourceImage]:
    """Pictures of class folders.

    Raises:
        SourceError: One cannot be read.
    """
    for file, label, split, content in zip(files, labels, splits, _contents(files), strict=True):
        yield SourceImage(file.path, label, None, split, content, 0)


def _contents(files: tuple[SourceFile, ...]) -> Iterator[bytes]:
    """Whole files in order; elsewhere some are asked for at once, as each takes a while to come."""
    if not any(is_remote(file.path) for file in files):
        yield from map(content_of, files)
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pending: deque[Future[bytes]] = deque()
        try:
            for file in files:
                pending.append(pool.submit(content_of, file))
                if len(pending) == 2 * _AT_ONCE:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def images_of_tar(
    file: SourceFile, split: Split | None, *, label_key: str, scratch: Path
) -> Iterator[SourceImage]:
    """Yield pictures of a tar shard, in its order.

    Args:
        split: Split of the whole shard, if its name says it.
        label_key: Key of the label in JSON.
        scratch: Folder for a copy of a packed or remote shard: labels may be anywhere in it.

    Raises:
        SourceError: It is damaged, or a picture has no label.
    """
    try:
        with _local_copy(file, scratch) as opened:
            yield from _Tar(opened, file, label_key).images(split)
    except OSError as error:
        raise _unreadable(file, error) from error


def _local_copy(file: SourceFile, scratch: Path) -> BinaryIO:
    """A file as plain bytes that can be read anywhere at once."""
    is_packed = file.format != "tar"
    opened = open_file(file)
    if not is_packed and not is_remote(file.path):
        return opened
    copy = TemporaryFile(dir=scratch)  # noqa: SIM115 - the caller closes it
    with opened:
        try:
            source = gzip.GzipFile(fileobj=opened) if is_packed else opened
            shutil.copyfileobj(source, copy, _COPY_BYTES)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            copy.close()
            raise SourceError(
                f"{escape_text(file.path)} is not a gzip file, or is damaged or cut off: {error}. "
                "Copy it again, or take it out of data.source."
            ) from error
    copy.seek(0)
    return copy


class _Tar:
    """An open tar file and what its names say."""

    def __init__(self, opened: BinaryIO, file: SourceFile, label_key: str) -> None:
        self._opened = opened
        self._path = escape_text(file.path)
        self._file = file
        self._label_key = label_key

    def images(self, split: Split | None) -> Iterator[SourceImage]:
        images: dict[str, Member] = {}
        labels: dict[str, dict[str, Member]] = {}
        for member in members(self._opened, self._file.path):
            found = _KEY.fullmatch(member.name)
            if found is None or PurePosixPath(member.name).name.startswith((".", "__")):
                continue
            key, suffix = found[1], found[2].lower()
            if suffix in PICTURES:
                self._reject_duplicate(images.get(key), member)
                images[key] = member
            elif suffix in ("cls", "json"):
                self._reject_duplicate(labels.get(key, {}).get(suffix), member)
                labels.setdefault(key, {})[suffix] = member
        self._check_labels_have_images(images, labels)
        label_of = self._from_file if labels else self._from_folder
        split_of = self._splits(images) if split is None and not labels else {}
        for key, member in sorted(images.items(), key=lambda each: each[1].offset):
            if split_of and key not in split_of:
                continue  # of a test split next to a validation split
            label = label_of(member, labels.get(key, {}))
            own = split_of.get(key, split)
            name = f"{self._file.path}, member {member.name}"
            yield SourceImage(name, label, None, own, self._read(member), member.offset)

    def _read(self, member: Member) -> bytes:
        self._opened.seek(member.offset)
        content = self._opened.read(member.size)
        if len(content) != member.size:
            raise SourceError(f"{self._path} changed while it was read. Prepare again.")
        return content

    def _reject_duplicate(self, first: Member | None, second: Member) -> None:
        if first is not None:
            raise SourceError(
                f"{self._path} holds {escape_text(first.name)} and {escape_text(second.name)}, "
                "which are of one sample. Give each picture a name of its own."
            )

    def _check_labels_have_images(
        self, images: Mapping[str, Member], labels: Mapping[str, Mapping[str, Member]]
    ) -> None:
        for key in labels.keys() - images.keys():
            (member, *_) = labels[key].values()
            raise SourceError(
                f"{self._path}: member {escape_text(member.name)} belongs to no picture of that "
                "name in this file. Write the shard again with all parts of a sample side by side."
            )

    def _from_folder(self, member: Member, _: Mapping[str, Member]) -> int | str:
        parts = PurePosixPath(member.name).parts
        if len(parts) < 2 or parts[-2] == ".":
            raise SourceError(
                f"{self._path}: member {escape_text(member.name)} has no label: neither .cls nor "
                ".json next to it, nor a folder of its class. Write the shard as webdataset has "
                "it."
            )
        return parts[-2]

    def _splits(self, images: Mapping[str, Member]) -> dict[str, Split]:
        """Return the splits that folders in a tar file name: ``.../train/CLASS/name.jpg``."""
        words = {
            key: split_word("/".join(PurePosixPath(member.name).parts[-3:]), "folders")
            for key, member in images.items()
        }
        held_out = validation_word(set(words.values()))
        if held_out is None:
            return {}
        used: dict[str | None, Split] = {held_out: "eval", "train": "train"}
        return {key: used[word] for key, word in words.items() if word in used}

    def _from_file(self, member: Member, labels: Mapping[str, Member]) -> int | str:
        where = f"{self._path}, member {escape_text(member.name)}"
        if "cls" in labels:
            text = self._read(labels["cls"])[:_LABEL_BYTES].decode(errors="replace").strip()
            if not text:
                raise SourceError(f"{where}: its .cls is empty. Write a number or a name there.")
            return _label(text, where)
        if "json" not in labels:
            raise SourceError(
                f"{where} has no label: neither .cls nor .json of that name is in this file. "
                "Write the shard again with all parts of a sample."
            )
        try:
            about = parse_json(self._read(labels["json"]))
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{where}: its .json is not JSON ({error}). Write it again."
            ) from error
        if not isinstance(about, dict) or self._label_key not in about:
            keys = ", ".join(sorted(map(str, about))[:8]) if isinstance(about, dict) else "no keys"
            raise SourceError(
                f"{where}: its .json has no {self._label_key!r} (it has {escape_text(keys)}). Name "
                "the key of the label in data.images.label_key."
            )
        return _label(about[self._label_key], where)


def images_of_digits() -> Iterator[SourceImage]:
    """The handwritten digits of the package, which say themselves what is held out."""
    for number, digit in enumerate(read_digits()):
        split: Split = "eval" if digit.is_validation else "train"
        yield SourceImage(
            f"digits, line {number + 1}", digit.label, None, split, png(digit.pixels), -1
        )


def images_of_parquet(
    file: SourceFile, split: Split | None, *, image_key: str, label_key: str
) -> Iterator[SourceImage]:
    """Pictures of a Parquet file, in the order of its rows.

    Raises:
        SourceError: It is damaged, or has no such columns, or a row no picture or no label.
        RequestError: pyarrow is not installed.
    """
    path = escape_text(file.path)
    pyarrow = extra("parquet", "pyarrow", what=path)
    parquet = extra("parquet", "pyarrow.parquet", what=path)
    try:
        with open_file(file) as opened:
            table = parquet.ParquetFile(opened)
            columns = _columns(table, path, image_key, label_key)
            names = class_names(table, label_key)
            row = 0
            for batch in table.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                for each in batch.to_pylist():
                    row += 1
                    yield _of_row(each, columns, names, split, f"{file.path}, row {row}")
    except pyarrow.ArrowException as error:
        raise _no_parquet(path, error) from error
    except OSError as error:
        if error.errno is not None:  # of the file system, and none of Arrow's own
            raise _unreadable(file, error) from error
        raise _no_parquet(path, error) from error


def class_names(table: Any, label_key: str) -> tuple[str, ...]:
    """Return names of numbered classes, as Hugging Face's datasets keep them with the schema."""
    kept = (table.schema_arrow.metadata or {}).get(b"huggingface", b"")
    try:
        feature = parse_json(kept)["info"]["features"][label_key]
        return tuple(str(name) for name in feature["names"])
    except (TypeError, ValueError, KeyError):
        return ()


def _columns(table: Any, path: str, image_key: str, label_key: str) -> list[str]:
    names = table.schema_arrow.names
    for key, setting in ((image_key, "image_key"), (label_key, "label_key")):
        if names.count(key) != 1:
            raise SourceError(
                f"{path}: {'no column' if key not in names else 'several columns'} "
                f"{escape_text(key)!r} "
                f"(its columns: {escape_text(', '.join(names))}). Name the right one in "
                f"data.images.{setting}."
            )
    return [image_key, label_key]


def _of_row(
    row: Mapping[str, Any],
    columns: list[str],
    names: tuple[str, ...],
    split: Split | None,
    where: str,
) -> SourceImage:
    image, label = (row[column] for column in columns)
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes):
        raise SourceError(
            f"{escape_text(where)}: {columns[0]!r} holds no bytes of a picture. Name its column in "
            "data.images.image_key; where the file holds paths only, write it again with the "
            "pictures in it."
        )
    found = _label(label, escape_text(where))
    name = names[found] if isinstance(found, int) and found < len(names) else None
    return SourceImage(where, found, name, split, content, -1)


def _label(value: object, where: str) -> int | str:
    """Return a label as a number, or as a name.

    Raises:
        SourceError: It cannot be the number or name of a class.
    """
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    is_number = re.fullmatch(r"-?[0-9]+", text, re.ASCII) is not None
    if not text or (is_number and (int(text) < 0 or len(text) > 9)):
        raise SourceError(
            f"{where}: its label {escape_text(repr(value)[:80])} is neither a number from 0 nor a "
            "name. Take it out, as test sets have no labels, or correct it."
        )
    return int(text) if is_number else text


def _no_parquet(path: str, error: Exception) -> SourceError:
    why = " ".join(str(error).split())[:200].rstrip(".")
    return SourceError(
        f"{path} cannot be read as Parquet: {escape_text(why)}. It is cut off, damaged, or "
        "something else by that name. Copy or write it again."
    )


def _unreadable(file: SourceFile, error: OSError) -> SourceError:
    return SourceError(
        f"{escape_text(file.path)} cannot be read: {error.strerror or error}. Check that it is "
        "there and readable, or take it out of data.source."
    )
