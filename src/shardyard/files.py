"""Files and folders that are there whole or not at all, and that no other user may change."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Of a run's folder and files: whoever may write there decides what a verb executes and ends, so
neither group nor others may, whatever the umask; it can only take rights away."""

_NO_FLUSH = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


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
