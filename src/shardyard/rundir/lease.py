"""Lease that keeps two agents from training one run at the same time.

It is a file lock (``io/files.py``): it needs no timeout and no cleanup. The file's
text names its holder.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from shardyard.errors import RequestError, StorageError
from shardyard.io.files import (
    FILE_MODE,
    adopt_lock,
    break_links,
    close_locked,
    lock_descriptors,
    make_folder,
    open_plain,
    parse_json,
    take_lock,
)

_SHARED = (
    " lease.json has a second name, as in a copy of the run made with `cp -al`: that may be the "
    "run that is trained. Copy runs with `cp -r`."
)


class Lease:
    """Holds the right to train one run until closed or until this process ends."""

    def __init__(self, path: Path) -> None:
        """Take the lease.

        Raises:
            RequestError: Another process holds it.
            StorageError: The run folder cannot be written.
        """
        try:
            make_folder(path.parent)
            self._descriptor: int | None = _take(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}.") from error
        self._name_holder()

    @classmethod
    def handed_over(cls, descriptors: Sequence[int]) -> "Lease":
        """The lease that the parent process took and passed on at the start of this one."""
        lease = cls.__new__(cls)
        lease._descriptor = adopt_lock(descriptors)
        lease._name_holder()
        return lease

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files to pass to a process that takes it over; close it here once that started."""
        return lock_descriptors(self._open)

    def close(self) -> None:
        """Give the lease back, unless another process took it over; safe to repeat."""
        if self._descriptor is not None:
            close_locked(self._descriptor)
            self._descriptor = None

    @property
    def _open(self) -> int:
        assert self._descriptor is not None, "the lease was given back"
        return self._descriptor

    def _name_holder(self) -> None:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        os.ftruncate(self._open, 0)
        os.pwrite(self._open, json.dumps(holder).encode(), 0)


def _take(path: Path) -> int:
    """Open and lock the lease's file; one that a copy by `cp -al` shares is replaced.

    Raises:
        RequestError: Another process holds it.
        OSError: The folder cannot be written.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        if not take_lock(descriptor):
            text = os.pread(descriptor, 4096, 0).decode(errors="replace")
            links = os.fstat(descriptor).st_nlink
            close_locked(descriptor)
            raise RequestError(
                f"run {path.parent.name} is being trained already ({_holder(text)}). Two at once "
                "would overwrite each other's checkpoints. Wait for it, or stop that process "
                f"(SIGTERM drains it) and resume again.{_SHARED * (links > 1)}"
            )
        if _is_file(descriptor, path):
            if os.fstat(descriptor).st_nlink == 1:
                return descriptor
            break_links(path)  # the next turn locks the new file
        close_locked(descriptor)


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to an open file: another process may have replaced it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether some process holds the lease now; asks without taking it.

    Raises:
        StorageError: The lease is no plain file, or cannot be read.
    """
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return False
    try:
        # Shared: two who ask at the same time do not see each other, but both see a holder.
        return not take_lock(descriptor, is_shared=True)
    finally:
        close_locked(descriptor)


def _holder(text: str) -> str:
    try:
        holder = parse_json(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
        return f"process {holder['pid']} on {holder['host']}, since {since}"
    except (ValueError, KeyError, TypeError, OverflowError):
        return "holder not named yet"
