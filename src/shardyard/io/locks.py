"""File locks: one holder at a time, refused or waited for; dropped by the kernel with the holder.

Nothing has to time out and nothing to be cleaned up, however the holder ends. Where a file system
has no ``flock`` (Lustre mounted without ``-o flock``, some NFS and FUSE) the lock is held in a file
of this machine instead, so that it protects from processes of this machine only.
"""

import errno
import fcntl
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shardyard.io.files import FILE_MODE
from shardyard.io.polling import wait_for

_NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
"""What ``flock`` fails with on a file system that has none. Source: flock(2), and Lustre's manual
for ENOSYS."""
_FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock`` of Linux with 64 bits: type, whence, start, length, process."""
_POLL_S = 0.2

_on_machine: dict[int, int] = {}
"""Locked descriptor -> the descriptor that holds its lock in the file of this machine."""


def take_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file or folder, until ``close_locked``; False: another process holds it.

    Args:
        is_shared: Others may have it too who ask so, and nobody who asks for it alone.
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
    """Hold a lock file, made where it is missing, while the block runs.

    Args:
        waits: Told once where another process holds it; its end is then waited for.

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
    """Lock a byte of a file in this machine's memory that stands for the file.

    The byte is locked by open file description, as ``flock`` does it: two of one process exclude
    each other, and a forked process shares its parent's.
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
