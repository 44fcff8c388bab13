"""File locks: one holder at a time, refused or waited for; dropped by the kernel with the holder.

Nothing has to time out and nothing to be cleaned up, however the holder ends.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardyard.files import FILE_MODE


def take_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file or folder, until it is closed; False: another process holds it.

    Args:
        is_shared: Others may have it too who ask so, and nobody who asks for it alone.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
