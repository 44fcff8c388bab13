"""Files and folders that are there whole or not at all, and that no other user may change.

A file that a user names may also be a pipe, which is not waited for without a bound."""

import errno
import fcntl
import json
import os
import select
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardyard.errors import JsonFileError, StorageError
from shardyard.io.polling import wait_for

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Modes of a run's folder and files, for any umask, which can only take rights away.

Users who may write there decide what a verb executes and ends, so neither group nor others
may.
"""

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
    """Open a plain file to read it, without waiting for a pipe's writer.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        FileNotFoundError: No file has this name.
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
    """Return the content of a plain file.

    Args:
        limit_bytes: Limit on its size.

    Raises:
        FileNotFoundError: No file has this name.
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
    """Return the content of a JSON file, which anyone may have written.

    Args:
        limit_bytes: Limit on the size of the file.

    Raises:
        FileNotFoundError: No file has this name.
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
    """Read a file that holds an object, like ``read_json``.

    Raises:
        FileNotFoundError: No file has this name.
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
        OSError: The file system reported an error.
    """
    flush_tree(scratch)
    scratch.rename(to)
    flush_folder(to.absolute().parent)


def publish_file(scratch: Path, to: Path) -> None:
    """Give a finished file its name, in place of what has it; on disk when this returns.

    Raises:
        OSError: The file system reported an error.
    """
    _flush(scratch, os.O_RDONLY)
    scratch.replace(to)
    flush_folder(to.absolute().parent)


def flush_tree(folder: Path) -> None:
    """Make all files and names in a folder durable.

    Raises:
        OSError: The file system reported an error.
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


# File locks: one holder at a time, refused or waited for; dropped by the kernel with the holder.
#
# Nothing has to time out and nothing to be cleaned up, however the holder ends. Where a file system
# has no ``flock`` (Lustre mounted without ``-o flock``, some NFS and FUSE) the lock is held in a
# file of this machine instead, so that it protects from processes of this machine only.

_NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
"""Errors of ``flock`` on a file system that has none.

Source: flock(2), and Lustre's manual for ENOSYS.
"""
_FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock`` of Linux with 64 bits: type, whence, start, length, process."""
_POLL_S = 0.2

_on_machine: dict[int, int] = {}
"""Locked descriptor -> the descriptor that holds its lock in the file of this machine."""


def take_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file or folder, until ``close_locked``; False: another process holds it.

    Args:
        is_shared: Other processes may hold a shared lock too, but no exclusive one.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        return _take_on_machine(descriptor, is_shared=is_shared)
    return True


def close_locked(descriptor: int) -> None:
    """Close a file or folder that may be locked, and with it its lock."""
    drop_lock(descriptor)
    os.close(descriptor)


def lock_descriptors(descriptor: int) -> tuple[int, ...]:
    """The open files that a child process needs to take over a lock, the locked one first."""
    return (descriptor, *([_on_machine[descriptor]] if descriptor in _on_machine else []))


def adopt_lock(descriptors: Sequence[int]) -> int:
    """Take over a lock from the parent process; the locked file."""
    descriptor, *held = descriptors
    for each in descriptors:
        os.set_inheritable(each, False)
    if held:
        _on_machine[descriptor] = held[0]
    return descriptor


def drop_lock(descriptor: int) -> None:
    """Give back a lock that does not end with its file; call before another closes the file."""
    if (held := _on_machine.pop(descriptor, None)) is not None:
        os.close(held)


def missing_locks(folder: Path) -> str | None:
    """Why files of a folder cannot be locked; None: they can. Asked of a file that is removed.

    Raises:
        OSError: No file can be made there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:  # folders may have locks where files have none
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            return str(error.strerror)
    return None


@contextmanager
def locked(file: Path, *, waits: Callable[[], object]) -> Iterator[None]:
    """Hold a lock file, created if it is missing, while the block runs.

    Args:
        waits: Called once if another process holds it; its end is then waited for.

    Raises:
        OSError: The file cannot be made.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        if not take_lock(descriptor):
            waits()
            wait_for(lambda: take_lock(descriptor) or None, every_s=_POLL_S)
        yield
    finally:
        close_locked(descriptor)


def _take_on_machine(descriptor: int, *, is_shared: bool) -> bool:
    """Lock a byte of a file in this machine's memory, in place of the file.

    The byte is locked by open file description, as ``flock`` does it: two of one process
    exclude each other, and a forked process shares its parent's.
    """
    drop_lock(descriptor)  # of a file of the same number that was closed without its lock
    state = os.fstat(descriptor)
    if (held := _lock_file(state.st_uid)) is None:
        return True
    is_writable = fcntl.fcntl(held, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    kind = fcntl.F_RDLCK if is_shared or not is_writable else fcntl.F_WRLCK
    byte = hash((state.st_dev, state.st_ino)) & (2**62 - 1)
    try:
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        os.close(held)
        return False
    except OSError:
        os.close(held)
        raise
    _on_machine[descriptor] = held
    return True


def _lock_file(owner: int) -> int | None:
    """Open the file with this machine's locks on files of a user.

    Other users may read it, which is enough to see who holds a lock. None: it cannot be made, or
    another user made it.
    """
    memory = Path("/dev/shm")
    folder = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    path, flags = folder / f"shardyard-locks-{owner}", os.O_CLOEXEC | os.O_NOFOLLOW
    for more in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        with suppress(OSError):
            held = os.open(path, flags | more, FILE_MODE)
            state = os.fstat(held)
            if stat.S_ISREG(state.st_mode) and state.st_uid in (owner, os.geteuid()):
                return held
            os.close(held)
            return None
    return None


def read_user_file(path: Path, *, limit_bytes: int, within_s: float = 10.0) -> bytes:
    """Return the content of a file that a user names: a plain file, or a pipe: ``<(command)``.

    Args:
        limit_bytes: Limit on its size.
        within_s: How long a pipe is waited for.

    Raises:
        FileNotFoundError: No file has this name.
        StorageError: It cannot be read, is a folder, a socket or a device, is too large, or no
            process writes to the pipe.
    """
    if not path.is_fifo():
        return read_plain(path, limit_bytes=limit_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    content, deadline = b"", time.monotonic() + within_s
    try:
        while len(content) <= limit_bytes:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise StorageError(
                    f"{path} is a named pipe, and no data came from it in {within_s:g} s."
                )
            block = os.read(descriptor, 65536)
            if not block:
                break
            content += block
    finally:
        os.close(descriptor)
    if not content:
        raise StorageError(f"{path} is a named pipe, and no process writes to it.")
    if len(content) > limit_bytes:
        raise StorageError(f"{path} has more than the {limit_bytes:,} bytes that are read.")
    return content
