"""Memory that a node's agent and workers share, and the error when /dev/shm has no room.

The agent's memory outlives its workers and has no name. It is a file without a folder entry
(memfd). Workers open it through the agent's open files in /proc, so nothing is left in /dev/shm,
however either side ends. It exists only on Linux. Semaphores of multiprocessing do need /dev/shm.
"""

import errno
import mmap
import multiprocessing.synchronize
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardyard.errors import StorageError

NOTES = "notes"
"""Label of what each rank notes (`elastic/heartbeat.py`)."""

_VARIABLE = "SHARDYARD_MEMORY_"
"""With the label in capitals: where workers find the memory; the fork server inherits it."""


@dataclass(frozen=True)
class AgentMemory:
    """One piece of it, in the agent; empty until somebody gives it a size."""

    descriptor: int

    @classmethod
    def create(cls, label: str) -> "AgentMemory | None":
        """Make it and tell later child processes where; None where the system has no memfd.

        Args:
            label: Of letters and underscores; one piece of memory each.
        """
        if sys.platform != "linux":
            return None
        memory = cls(os.memfd_create(f"shardyard-{label}", os.MFD_CLOEXEC))
        os.environ[_variable(label)] = f"/proc/{os.getpid()}/fd/{memory.descriptor}"
        return memory

    def size_bytes(self) -> int:
        """Return the current size; 0 if none was set yet."""
        return os.fstat(self.descriptor).st_size

    def grow(self, size_bytes: int) -> None:
        """Take the pages for at least so much.

        Raises:
            OSError: There is not as much memory.
        """
        os.posix_fallocate(self.descriptor, 0, size_bytes)

    def write(self, content: bytes) -> None:
        """Replace the content; no process may have mapped it."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)

    def view(self) -> mmap.mmap | None:
        """Map all of it at its current size; None: no size was set yet."""
        size_bytes = self.size_bytes()
        return mmap.mmap(self.descriptor, size_bytes) if size_bytes else None


def attach(label: str, size_bytes: int | None = None) -> mmap.mmap | None:
    """Return the agent's memory of this label, in a worker; None: no agent owns one.

    Args:
        size_bytes: Size of the whole piece; it grows to this if it is smaller, and never
            shrinks. None: all that there is, and no memory where it has no size yet.

    Raises:
        OSError: There is not as much memory.
    """
    path = os.environ.get(_variable(label))
    if path is None:
        return None
    descriptor = os.open(Path(path), os.O_RDWR | os.O_CLOEXEC)
    try:
        # Ranks attach at the same time: this call never shrinks what another has made larger. It
        # takes the pages too, so that a lack of memory is an error here and no SIGBUS later.
        if size_bytes is not None:
            os.posix_fallocate(descriptor, 0, size_bytes)
        mapped_bytes = os.fstat(descriptor).st_size if size_bytes is None else size_bytes
        return mmap.mmap(descriptor, mapped_bytes) if mapped_bytes else None
    finally:
        os.close(descriptor)


def _variable(label: str) -> str:
    return _VARIABLE + label.upper()


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
