"""Lease of a run's place in a bucket, which keeps two trainings of one run apart.

The object is written on conditions: only if there is none, and later only over the version that
this holder wrote. A holder writes it again every half minute. So another one sees whether it is
alive without comparing clocks: it waits for the version to change.
"""

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from shardyard.errors import RequestError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.io.object_store import ObjectStore
from shardyard.rundir.layout import RunDir

LEASE = "lease.json"
_BEAT_S = 30.0
"""Between two writes of a holder."""
_SILENCE_S = 100.0
"""Without a write for so long, a holder is gone: three writes, and time for retries of one."""
_LOOK_S = 5.0


def owner_of(run_dir: RunDir) -> str:
    """Identify a run folder: its next attempt takes over at once what this one left behind."""
    try:
        with run_dir.events.open("rb") as file:
            first = file.readline()  # when the run was begun, and by whom
    except OSError:
        first = b""
    return hashlib.sha256(first).hexdigest()[:16]


class BucketLease:
    """The right to write to a run's place in a bucket, held until closed. Rank 0 has it.

    Args:
        owner: Whose predecessor need not be waited for, see ``owner_of``.
    """

    def __init__(
        self,
        store: ObjectStore,
        owner: str,
        *,
        beat_s: float = _BEAT_S,
        silence_s: float = _SILENCE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the lease.

        Raises:
            RequestError: Another training of this run holds it.
            ShardyardError: The bucket cannot be read or written.
        """
        self._store, self._owner, self._sleep = store, owner, sleep
        self._id, self._count = secrets.token_hex(8), 0
        self._is_lost = False
        self._version = self._take(silence_s)
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, args=(beat_s,), name="bucket-lease", daemon=True
        )
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether another training of the run has taken it over."""
        return self._is_lost

    def close(self) -> None:
        """Give it back."""
        self._ended.set()
        self._thread.join()
        if self._is_lost:
            return
        try:
            self._store.delete([LEASE])
        except ShardyardError:
            return  # the next holder waits until this one counts as gone

    def _take(self, silence_s: float) -> str:
        version = self._store.write(LEASE, self._content(), if_absent=True)
        while version is None:
            held = self._store.read(LEASE)
            if held is None:  # given back just now
                version = self._store.write(LEASE, self._content(), if_absent=True)
                continue
            content = _parse(held[0])
            if content.get("id") == self._id:  # written, and the answer was lost
                return held[1]
            if content.get("owner") != self._owner:
                self._wait_for_silence(content, held[1], silence_s)
            version = self._store.write(LEASE, self._content(), if_version=held[1])
        return version

    def _wait_for_silence(self, content: dict[str, str], version: str, silence_s: float) -> None:
        until_s = time.monotonic() + silence_s
        while time.monotonic() < until_s:
            self._sleep(_LOOK_S)
            now = self._store.read(LEASE)
            if now is not None and now[1] != version:
                raise RequestError(
                    f"checkpoint.to: {self._store.location} is in use: host "
                    f"{content.get('host', '?')} trains a run of this id and saves there. Stop it "
                    "first, or give this run an id of its own: run.id=NAME"
                )
            if now is None:
                return

    def _renew(self, beat_s: float) -> None:
        while not self._ended.wait(beat_s):
            try:
                self._count += 1
                version = self._store.write(LEASE, self._content(), if_version=self._version)
                if version is None:
                    held = self._store.read(LEASE)
                    is_ours = held is not None and _parse(held[0]).get("id") == self._id
                    version = held[1] if held is not None and is_ours else None
            except ShardyardError:
                continue  # the bucket cannot be reached; uploads say so
            if version is None:
                self._is_lost = True
                return
            self._version = version

    def _content(self) -> bytes:
        content = {
            "id": self._id,
            "owner": self._owner,
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "count": str(self._count),
        }
        return json.dumps(content).encode()


def _parse(content: bytes) -> dict[str, str]:
    try:
        found = parse_json(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
