"""Files that a user names: plain files, and pipes that are not waited for without a bound."""

import os
import select
import time
from pathlib import Path

from shardyard.errors import StorageError
from shardyard.io.files import read_plain


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
                    f"{path} is a named pipe, and nothing came from it in {within_s:g} s."
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
