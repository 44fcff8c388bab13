"""Remote files into a local folder: each under a scratch name until its SHA-256 is right.

A call that was interrupted is repeated: right files stay, and a half file continues where
it stopped, also after a broken connection. Wrong files are fetched once more, then
rejected.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardyard.errors import (
    AccessError,
    CapacityError,
    DataError,
    LostError,
    RequestError,
    ShardyardError,
    StorageError,
)
from shardyard.io.digests import (
    COMPLETE,
    FileDigest,
    FolderDigests,
    digest_mismatch,
    parse_digest,
    validate_name,
)
from shardyard.io.files import make_folder, parse_json, publish_file, publish_folder, write_text
from shardyard.io.polling import backoff_s
from shardyard.rundir.contracts import checkpoint_of, is_fetched
from shardyard.units import format_bytes

PARTS = ".fetch"
"""Folder of half files, below the folder that they are for."""

_TRIES = 6
"""Tries in a row without any data, before it gives up."""
_LONGEST_PAUSE_S = 20.0
_BLOCK_BYTES = 2**20

ProgressCallback = Callable[[str, int], None]
"""Name of a file, and bytes of it that are right here now that were not before."""


class FileSource(Protocol):
    """Source of files."""

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        """A file's bytes from an offset on.

        Raises:
            LostError: The connection broke before its end.
            ShardyardError: It cannot be read.
        """


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    """Files of a folder that this machine sees."""

    folder: Path

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(offset)
                while block := file.read(_BLOCK_BYTES):
                    yield block
        except OSError as error:
            raise DataError(
                f"{self.folder / name} cannot be read: {error.strerror}. A running run may have "
                "removed it; repeat the command to take what is there now."
            ) from error


def missing_locally(files: Mapping[str, FileDigest], folder: Path) -> dict[str, FileDigest]:
    """Return the files that are missing here or differ; reads existing ones."""
    return {
        name: wanted
        for name, wanted in files.items()
        if digest_mismatch(folder / validate_name(name), wanted) is not None
    }


def check_free_space(needed_bytes: int, folder: Path) -> None:
    """Raise unless the file system of a folder has room.

    Raises:
        StorageError: It has not.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise StorageError(
            f"{folder} has {format_bytes(free)} free, and {format_bytes(needed_bytes)} are to "
            "come. No file was fetched. Make room, give another folder with --to, or fewer "
            "checkpoints with --step."
        )


def steadily(
    source: FileSource, name: str, offset: int, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bytes]:
    """Yield a file's bytes, continued where a connection broke.

    Raises:
        LostError: No more data arrive.
    """
    in_vain = 0
    while True:
        try:
            for piece in source.read(name, offset):
                offset += len(piece)
                in_vain = 0 if piece else in_vain
                yield piece
            return
        except LostError:
            in_vain += 1
            if in_vain == _TRIES:
                raise
            sleep(backoff_s(in_vain, first_s=0.5, longest_s=_LONGEST_PAUSE_S))


def receive(
    source: FileSource,
    files: Mapping[str, FileDigest],
    folder: Path,
    *,
    on_progress: ProgressCallback,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Bring files into a folder; each appears under its name once it is right.

    Raises:
        DataError: A file came wrong twice.
        LostError: No more data arrive.
        StorageError: The folder cannot be written.
    """
    parts = folder / PARTS
    try:
        for name, wanted in sorted(files.items()):
            target = folder / validate_name(name)
            if digest_mismatch(target, wanted) is None:
                on_progress(name, wanted.bytes)
                continue
            make_folder(parts)
            key = hashlib.sha256(f"{name}\n{wanted.sha256}".encode()).hexdigest()[:32]
            _download_file(source, name, wanted, parts / key, on_progress=on_progress, sleep=sleep)
            make_folder(target.parent)
            publish_file(parts / key, target)
        shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(parts, ignore_errors=True)
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}. Make room (`df -h`) or take another "
            "folder with --to, then repeat the command: it brings what is missing."
        ) from error


def receive_whole(
    source: FileSource,
    files: Mapping[str, FileDigest],
    to: Path,
    *,
    on_progress: ProgressCallback,
    complete: FolderDigests | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Bring a folder that is only useful as a whole; it appears under its name once complete.

    Args:
        complete: Written next to the files as ``complete.json``.

    Raises:
        The errors of ``receive``.
    """
    if to.is_dir() and not missing_locally(files, to):
        for name, wanted in files.items():
            on_progress(name, wanted.bytes)
        return
    scratch = to.absolute().with_name(f".{to.name}.fetch")
    try:
        for name, wanted in files.items():  # of a damaged copy, what is right
            if digest_mismatch(to / name, wanted) is None and not (scratch / name).exists():
                make_folder((scratch / name).parent)
                os.link(to / name, scratch / name)
        receive(source, files, scratch, on_progress=on_progress, sleep=sleep)
        if complete is not None:
            write_text(scratch / COMPLETE, complete.text())
        _replace_folder(scratch, to)
    except StorageError:
        shutil.rmtree(scratch, ignore_errors=True)  # of a full disk nothing may be kept
        raise
    except OSError as error:
        raise StorageError(
            f"{to} cannot be written: {error.strerror}. Check that the place is yours and has room "
            "(`df -h`), then repeat the command."
        ) from error


def _replace_folder(scratch: Path, to: Path) -> None:
    old = to.absolute().with_name(f".{to.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if to.exists():
        to.rename(old)
    publish_folder(scratch, to)
    shutil.rmtree(old, ignore_errors=True)


def _download_file(
    source: FileSource,
    name: str,
    expected: FileDigest,
    part: Path,
    *,
    on_progress: ProgressCallback,
    sleep: Callable[[float], None],
) -> None:
    """One file, to its last byte and with the right digest."""
    for is_last in (False, True):
        found = _fill(source, name, expected, part, on_progress=on_progress, sleep=sleep)
        if found == expected:
            return
        size = part.stat().st_size
        on_progress(name, -size)
        part.unlink()
        if is_last:
            raise DataError(
                f"{name} came wrong twice: {found.bytes:,} bytes with SHA-256 "
                f"{found.sha256[:12]}... instead of {expected.bytes:,} with "
                f"{expected.sha256[:12]}.... "
                "It is not kept; all that came right is. If the file was changed meanwhile, repeat "
                "the command; else something on the way, or the disk there, is broken."
            )


def _fill(
    source: FileSource,
    name: str,
    expected: FileDigest,
    part: Path,
    *,
    on_progress: ProgressCallback,
    sleep: Callable[[float], None],
) -> FileDigest:
    """Continue a half file until it is as long as it must be, or its source has no more."""
    checksum, size = hashlib.sha256(), 0
    with part.open("a+b") as file:
        file.seek(0)
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            size += len(block)
        on_progress(name, size)
        pieces = steadily(source, name, size, sleep=sleep) if size < expected.bytes else ()
        for piece in pieces:
            kept = piece[: expected.bytes - size]
            file.write(kept)
            checksum.update(kept)
            size += len(kept)
            on_progress(name, len(kept))
            if size == expected.bytes:
                break
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size, checksum.hexdigest())


# What the far side says it has, held to its form before anything is written.
#
# The lines are those of ``shardyard.checkpoint.select``.

_ERRORS: dict[int, type[ShardyardError]] = {
    error.exit_code: error for error in (ShardyardError, RequestError, CapacityError, AccessError)
}


@dataclass(frozen=True, kw_only=True)
class RemoteListing:
    """Files of a run elsewhere."""

    files: dict[str, FileDigest] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    """Steps of the checkpoints among them."""
    best: int | None = None
    """The step that the run's ``best`` names."""
    warnings: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())

    @property
    def checkpoints(self) -> dict[str, dict[str, FileDigest]]:
        """Folder of a checkpoint -> its files, by their names in it."""
        by_folder: dict[str, dict[str, FileDigest]] = {}
        for name, digest in self.files.items():
            folder = checkpoint_of(name)
            if folder is not None:
                by_folder.setdefault(folder, {})[name.removeprefix(f"{folder}/")] = digest
        return by_folder

    @property
    def others(self) -> dict[str, FileDigest]:
        """Files that are not in checkpoints."""
        return {n: digest for n, digest in self.files.items() if checkpoint_of(n) is None}


def read_listing(lines: Iterable[str]) -> RemoteListing:
    """Read the lines of a listing.

    Raises:
        ShardyardError: The remote side's error; its class follows the exit code.
        DataError: A line is of another form, or a name would lead out of the run's folder.
    """
    files: dict[str, FileDigest] = {}
    for line in lines:
        try:
            content = parse_json(line)
            if "error" in content:
                kind = _ERRORS.get(content.get("exit_code"), ShardyardError)
                raise kind(str(content["error"]))
            if "end" in content:
                return _listing(files, content["end"])
            name = validate_name(content["file"])
            if not is_fetched(name):
                raise ValueError(f"{name!r} is not a file that the remote side of a run may send")
            files[name] = parse_digest(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"the remote side sent a listing that cannot be read: {error}. No file was "
                "written. Its image may hold another version of shardyard; use the same version "
                "on both sides."
            ) from error
    raise DataError(
        "the listing of the remote side was cut off. No file was written. Repeat the command."
    )


def _listing(files: dict[str, FileDigest], end: Any) -> RemoteListing:
    steps, best = end["steps"], end["best"]
    if any(type(step) is not int or step < 0 for step in [*steps, 0 if best is None else best]):
        raise ValueError(f"{steps!r} and {best!r} are not steps")
    warnings = tuple(str(text) for text in end["warnings"])
    return RemoteListing(files=files, steps=tuple(steps), best=best, warnings=warnings)
