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
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES"]
    while files := _files(folder):
        done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
        if done.returncode == 0:
            return sum(map(int, done.stdout.split()))
        if _files(folder) == files:  # else one was removed meanwhile
            raise RuntimeError(f"fincore: {done.stderr.strip()}")
    return 0


def read_bytes(pid: int) -> int:
    """What a process has had storage read, through mappings too."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def _files(folder: Path) -> list[Path]:
    # os.walk passes over a folder that is removed meanwhile, rglob does not
    return [Path(place, name) for place, _, names in os.walk(folder) for name in sorted(names)]
