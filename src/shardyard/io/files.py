"""Files and folders that are there whole or not at all, and that no other user may change."""

import errno
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.errors import JsonFileError, StorageError

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Of a run's folder and files: whoever may write there decides what a verb executes and ends, so
neither group nor others may, whatever the umask; it can only take rights away."""

_NO_FLUSH = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


MOST_JSON_BYTES = 64 * 2**20
"""Most that is read of a JSON file, unless its reader sets another limit."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_plain(path: Path) -> int:
    """Open a plain file to read it, without waiting for whoever writes to a pipe.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        FileNotFoundError: Nothing has this name.
        StorageError: It cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise StorageError(f"{path} is {_KINDS.get(kind, 'no plain file')}, not a file.")
    return descriptor


_BEYOND_SIZE_BYTES = 2**16
"""Allowance beyond the size of a file: it may grow, and files of /proc show no size."""


def read_plain(path: Path, *, limit_bytes: int | None = None) -> bytes:
    """The content of a plain file.

    Args:
        limit_bytes: Most that it may have.

    Raises:
        FileNotFoundError: Nothing has this name.
        StorageError: It cannot be read, is no plain file, or is larger than that.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if limit_bytes is not None and size > limit_bytes:
                raise StorageError(
                    f"{path} has {size:,} bytes, more than the {limit_bytes:,} that are read of "
                    "such a file."
                )
            # a read takes as much memory beforehand as it is allowed to return
            most = size + _BEYOND_SIZE_BYTES
            return file.read(-1 if limit_bytes is None else min(most, limit_bytes))
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: Path, *, limit_bytes: int = MOST_JSON_BYTES) -> Any:
    """The content of a JSON file, which anyone may have written.

    Args:
        limit_bytes: Most that the file may have.

    Raises:
        FileNotFoundError: Nothing has this name.
        JsonFileError: It cannot be read, is no plain file, is larger than that, is nested too
            deeply, or is not JSON.
    """
    try:
        content = read_plain(path, limit_bytes=limit_bytes)
    except StorageError as error:
        reason = str(error).removeprefix(f"{path} ").removesuffix(".")
        raise JsonFileError(path, reason) from error
    try:
        return parse_json(content)
    except ValueError as error:
        reason = f"is not JSON ({error})" if content else "is empty (0 bytes)"
        raise JsonFileError(path, reason) from error


def read_json_object(path: Path, *, limit_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """As ``read_json``, of a file that holds an object.

    Raises:
        FileNotFoundError: Nothing has this name.
        JsonFileError: As ``read_json``, or it holds another value.
    """
    content = read_json(path, limit_bytes=limit_bytes)
    if not isinstance(content, dict):
        raise JsonFileError(path, "holds no JSON object")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as ``json.loads`` does, with one kind of error for all that cannot be parsed.

    Raises:
        ValueError: It is not JSON, holds a number of thousands of digits, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing; its group and others may not write."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=FOLDER_MODE, exist_ok=True)
        flush_folder(each.parent)
    if not missing and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def write_json(path: Path, content: Any) -> None:
    """Write a whole JSON file so that readers see the old one or the new one, never a part.

    Raises:
        StorageError: The folder cannot be written.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file at once, flushed to disk: the new text is there whole, or the old one.

    Raises:
        StorageError: The folder cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_folder(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(scratch, flags, FILE_MODE), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Check that the folder exists, is yours "
            "and has room (`df -h`), or choose another with run.dir."
        ) from error


def create_text(path: Path, text: str) -> None:
    """Write a file that is not there yet, flushed to disk with its name.

    Raises:
        FileExistsError: It is there; of two who create it at once, one gets this.
        OSError: The folder cannot be written.
    """
    make_folder(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, FILE_MODE), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(path.parent)


def break_links(path: Path) -> None:
    """Give a file that has several names (`cp -al`) a copy of its own, so that it is not shared.

    Raises:
        OSError: The folder cannot be written.
    """
    if not path.is_file() or path.stat().st_nlink == 1:
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.copy2(path, scratch)
    _flush(scratch, os.O_RDONLY)
    scratch.replace(path)
    flush_folder(path.parent)


def publish_folder(scratch: Path, to: Path) -> None:
    """Give a finished folder its name: everything in it is on disk before, the name after.

    Raises:
        OSError: The file system refused.
    """
    flush_tree(scratch)
    scratch.rename(to)
    flush_folder(to.absolute().parent)


def publish_file(scratch: Path, to: Path) -> None:
    """Give a finished file its name, in place of what has it; on disk when this returns.

    Raises:
        OSError: The file system refused.
    """
    _flush(scratch, os.O_RDONLY)
    scratch.replace(to)
    flush_folder(to.absolute().parent)


def flush_tree(folder: Path) -> None:
    """Make all files and names in a folder durable.

    Raises:
        OSError: The file system refused.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            _flush(path, os.O_RDONLY)
        elif path.is_dir() and not path.is_symlink():
            flush_folder(path)
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable; a file's own flush does not cover its name."""
    _flush(folder, os.O_RDONLY | os.O_DIRECTORY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:  # SMB and some FUSE file systems flush no folders
            raise
    finally:
        os.close(descriptor)
