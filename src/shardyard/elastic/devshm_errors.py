"""/dev/shm, where the processes of a node share semaphores and memory, when it refuses."""

import errno
import multiprocessing.synchronize
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from shardyard.errors import StorageError


@contextmanager
def translate_semaphore_errors() -> Iterator[None]:
    """Turn the system's rejection of a semaphore inside the block into words.

    Raises:
        StorageError: It rejected one.
    """
    try:
        yield
    except OSError as error:
        if not _is_of_a_semaphore(error):
            raise
        is_full = error.errno == errno.ENOSPC
        raise StorageError(
            f"/dev/shm {'is full' if is_full else f'cannot be used: {error.strerror}'}. The "
            "processes of a node share semaphores and memory there. Remove what others left in it "
            "(`ls -l /dev/shm`, `df -h /dev/shm`), or give it more room: `docker run "
            "--shm-size=8g`, or in a pod an emptyDir with `medium: Memory` mounted there."
        ) from error


def _is_of_a_semaphore(error: OSError) -> bool:
    """Whether it was raised where multiprocessing makes one; the error itself names no file."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == multiprocessing.synchronize.__file__
