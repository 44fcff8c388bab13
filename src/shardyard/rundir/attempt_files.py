"""Files of an attempt: resolved.json, the rendezvous store's address, and the nodes' secret."""

import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shardyard.config.resolved import Resolved
from shardyard.errors import JsonFileError, RequestError, StorageError
from shardyard.io.files import make_folder, read_json_object, write_json
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class StoreLocation:
    """Node that serves the store, and its endpoint."""

    moves: int
    """Number of moves of the store in this attempt; 0: node 0 serves it, no file is written."""
    node_rank: int
    endpoint: str
    """HOST:PORT."""


def read_store_location(run: RunDir, attempt: int) -> StoreLocation | None:
    """None: the store has never moved."""
    try:
        return StoreLocation(**read_json_object(_path(run, attempt)))
    except (OSError, ValueError, TypeError):
        return None


def write_store_location(run: RunDir, attempt: int, location: StoreLocation) -> None:
    """Tell all nodes.

    Raises:
        StorageError: The run's folder cannot be written.
    """
    write_json(_path(run, attempt), asdict(location))


def _path(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "store.json"


# attempts/<n>/resolved.json: the resolved recipe of an attempt, each value with its reason.

_HINT = "It is written at the start of an attempt; resume the run to make a new attempt."


def read_resolved(path: Path) -> Resolved:
    """Read attempts/<n>/resolved.json.

    Raises:
        RequestError: The file is missing or is not what ``write_resolved`` writes.
    """
    try:
        return Resolved.from_json(read_json_object(path))
    except JsonFileError as error:
        raise RequestError(f"{error} {_HINT}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} cannot be read ({error}). {_HINT}") from error


@dataclass(frozen=True)
class LatestResolved:
    """The newest attempt whose resolved.json can be read."""

    resolved: Resolved | None
    """None if there is none."""
    torn: tuple[str, ...]
    """Files of newer attempts that exist and cannot be read; to be reported."""


def latest_resolved(run: RunDir) -> LatestResolved:
    """Return the newest resolved recipe, from the attempt before where the last file is torn."""
    torn: list[str] = []
    for number in reversed(run.attempts()):
        path = run.resolved(number)
        if not path.is_file():
            continue  # it was killed before it began
        try:
            return LatestResolved(read_resolved(path), tuple(torn))
        except RequestError:
            torn.append(f"{path} is torn")
    return LatestResolved(None, tuple(torn))


def write_resolved(path: Path, resolved: Resolved) -> None:
    """Write attempts/<n>/resolved.json at once."""
    write_json(path, resolved.to_json())


_SECRET_BYTES = 32
_WITHIN_S = 60.0
"""For the content of another node's new file; network file systems show it as late as this."""
_POLL_S = 0.05


def run_secret(run: RunDir, attempt: int) -> bytes:
    """Return the secret by which the nodes of an attempt trust each other; create a missing one.

    Only its owner may read the file, and the first node that needs it creates it. It is in no
    environment, on no command line and in no log, and is worthless once the attempt has ended.

    Raises:
        StorageError: The file cannot be written or read.
    """
    path = run.secret(attempt)
    try:
        make_folder(path.parent)
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(secrets.token_hex(_SECRET_BYTES).encode())
                file.flush()
                os.fsync(file.fileno())
        began_s = time.monotonic()
        while len(content := path.read_bytes()) != 2 * _SECRET_BYTES:
            if time.monotonic() - began_s > _WITHIN_S:
                raise OSError(0, f"{len(content)} bytes instead of {2 * _SECRET_BYTES}")
            time.sleep(_POLL_S)
        return bytes.fromhex(content.decode())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a hexadecimal number"
        raise StorageError(
            f"{path} cannot be used: {why}. The nodes of a run know each other by it. Start all of "
            f"them as the same user, and remove it if it is damaged: `rm {path}`."
        ) from error
