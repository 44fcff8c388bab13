"""attempts/<n>/secret: the secret by which the nodes of an attempt trust each other.

Only its owner may read the file, and the first node that needs it creates it. It is in no
environment, on no command line and in no log, and is worthless once the attempt has ended.
"""

import os
import secrets
import time
from contextlib import suppress

from shardyard.errors import StorageError
from shardyard.io.files import make_folder
from shardyard.rundir.layout import RunDir

_BYTES = 32
_WITHIN_S = 60.0
"""For the content of another node's new file; network file systems show it as late as this."""
_POLL_S = 0.05


def run_secret(run: RunDir, attempt: int) -> bytes:
    """The secret of an attempt, made now if it has none.

    Raises:
        StorageError: The file cannot be written or read.
    """
    path = run.secret(attempt)
    try:
        make_folder(path.parent)
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(secrets.token_hex(_BYTES).encode())
                file.flush()
                os.fsync(file.fileno())
        began_s = time.monotonic()
        while len(content := path.read_bytes()) != 2 * _BYTES:
            if time.monotonic() - began_s > _WITHIN_S:
                raise OSError(0, f"{len(content)} bytes instead of {2 * _BYTES}")
            time.sleep(_POLL_S)
        return bytes.fromhex(content.decode())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no hexadecimal number"
        raise StorageError(
            f"{path} cannot be used: {why}. The nodes of a run know each other by it. Start all of "
            f"them as the same user, and remove it if it is damaged: `rm {path}`."
        ) from error
