"""Memory that outlives a process, as an agent owns it: here files of a folder."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FolderMemory:
    """A file for each label; may be sent to other processes."""

    folder: Path

    def __call__(self, label: str, size_bytes: int | None = None, /) -> mmap.mmap | None:
        descriptor = os.open(self.folder / label, os.O_RDWR | os.O_CREAT)
        try:
            if size_bytes is not None:
                os.posix_fallocate(descriptor, 0, size_bytes)
            mapped = os.fstat(descriptor).st_size if size_bytes is None else size_bytes
            return mmap.mmap(descriptor, mapped) if mapped else None
        finally:
            os.close(descriptor)

    def flip_a_bit(self, label: str) -> None:
        """In the last tensor."""
        memory = self(label)
        assert memory is not None
        memory[-64] ^= 4
