"""The lease keeps two agents from training one run at the same time.

It is a file lock (``locks.py``): there is nothing to time out and nothing to clean up. The file's
text says who holds it.
"""

import json
import os
import socket
import time
from pathlib import Path

from shardyard.errors import RequestError, StorageError
from shardyard.files import FILE_MODE, make_folder, open_plain
from shardyard.locks import close_locked, take_lock


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
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}.") from error
        if not take_lock(self._descriptor):
            text = os.pread(self._descriptor, 4096, 0).decode(errors="replace")
            close_locked(self._descriptor)
            raise RequestError(
                f"run {path.parent.name} is being trained already ({_holder(text)}). Two at once "
                "would overwrite each other's checkpoints. Wait for it, or stop that process "
                "(SIGTERM drains it) and resume again."
            )
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def close(self) -> None:
        """Give the lease back."""
        close_locked(self._descriptor)


def is_held(path: Path) -> bool:
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
        holder = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
        return f"process {holder['pid']} on {holder['host']}, since {since}"
    except (json.JSONDecodeError, KeyError, TypeError):
        return "holder not named yet"
