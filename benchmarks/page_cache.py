"""What of some files the system keeps in memory: whether they were read since they were dropped.

A read from memory leaves no trace in a process's count of bytes from storage. So the files are
dropped first; then every read of them, also through a mapping, comes from storage and leaves its
pages in memory.
"""

import os
import subprocess
from pathlib import Path


def drop(folder: Path) -> None:
    """Write what is not on disk yet of all files below, and drop it from memory."""
    for path in _files(folder):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # removed meanwhile, and its pages with it
            continue
        try:
            os.fsync(descriptor)  # a page that is not written stays, as if it had been read
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_bytes(folder: Path) -> int:
    """Of all files below, in memory (`fincore` of util-linux)."""
    files = _files(folder)
    if not files:
        return 0
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


def read_bytes(pid: int) -> int:
    """What a process has had storage read, through mappings too."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
