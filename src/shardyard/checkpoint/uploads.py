"""Upload of durable checkpoints to a bucket, in a thread of its own on every rank.

A rank sends its own file, and never waits for another: one that fails to upload holds up no other
rank. Rank 0 lists the checkpoint's folder until all files are there, and then writes the
manifest. Which checkpoints are uploaded is rank 0's decision, which every save tells all ranks.
"""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from shardyard.checkpoint.bucket import RunBucket, folder_name
from shardyard.checkpoint.bucket_lease import BucketLease
from shardyard.checkpoint.io_priority import yield_to_training
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.upload_protocol import NotUploaded, Uploaded
from shardyard.checkpoint.verify import MANIFEST, VALUES, Manifest, read_manifest
from shardyard.errors import CheckpointError, LostError, ShardyardError
from shardyard.io.object_store import Stopped
from shardyard.io.polling import backoff_s
from shardyard.log import warn

_MOST_WAITING = 2
"""Checkpoints that are being uploaded or wait for it; a further one is left out."""
_TRIES = 5
_LONGEST_PAUSE_S = 60.0
_LOOK_S = 1.0
_WAIT_S = 900.0
"""Least time that rank 0 waits for files of others after its own."""

T = TypeVar("T")


class Uploads:
    """Uploads of one run. All ranks make the same calls.

    Args:
        lease: Rank 0's right to write there; None on other ranks.
        keep_last: Newest checkpoints that stay in the bucket.
    """

    def __init__(
        self,
        bucket: RunBucket,
        checkpoints_dir: Path,
        *,
        rank: int,
        lease: BucketLease | None,
        keep_last: int,
    ) -> None:
        self.bucket = bucket
        self._dir = checkpoints_dir
        self._rank = rank
        self._lease = lease
        self._keep_last = keep_last
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="upload", initializer=yield_to_training
        )
        self._stop = threading.Event()
        self._running: dict[int, Future[Uploaded | NotUploaded | None]] = {}
        self._skipped: list[NotUploaded] = []

    def accepts(self, step: int, *, is_best: bool) -> bool:
        """Whether rank 0 has a checkpoint uploaded; a best one always."""
        if is_best or len(self.unfinished) < _MOST_WAITING:
            return True
        reason = (
            f"{len(self.unfinished)} earlier checkpoints are still being uploaded to "
            f"{self.bucket.location}: saves come faster than they can be sent. Raise "
            "checkpoint.every"
        )
        self._skipped.append(NotUploaded(step, reason))
        return False

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Steps whose files are still needed on disk."""
        return tuple(step for step, each in list(self._running.items()) if not each.done())

    def add(self, step: int, *, is_best: bool, keep_older: bool = False) -> None:
        """Upload a durable checkpoint in the background."""
        self._running[step] = self._thread.submit(self._upload, step, is_best, keep_older)

    def poll(self) -> list[Uploaded | NotUploaded]:
        """Return what has ended since the last call, on rank 0; elsewhere none."""
        outcomes: list[Uploaded | NotUploaded] = []
        for step, each in list(self._running.items()):
            if each.done():
                del self._running[step]
                outcome = each.result()
                if outcome is not None:
                    outcomes.append(outcome)
        left_out, self._skipped = self._skipped, []
        return [*left_out, *outcomes]

    def is_missing(self, step: int) -> bool:
        """Whether a checkpoint on disk is neither in the bucket nor on its way, on rank 0."""
        if step in self.unfinished:
            return False
        try:
            _, content = _read_manifest(self._dir / step_name(step))
            return not self.bucket.is_whole(folder_name(step, content))
        except (ShardyardError, OSError):
            return True

    def close(self) -> None:
        """End the thread; an upload that is under way is given up."""
        self._stop.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._lease is not None:
            self._lease.close()

    def _upload(self, step: int, is_best: bool, keep_older: bool) -> Uploaded | NotUploaded | None:
        started, folder = time.monotonic(), ""
        path = self._dir / step_name(step)
        try:
            manifest, content = _read_manifest(path)
            folder = folder_name(step, content)
            self._send_own(manifest, path, folder)
            if self._rank != 0:
                return None
            self._wait_for_others(manifest, folder, own_s=time.monotonic() - started)
            self._check_lease()
            self._retried(lambda: self.bucket.commit(folder, content, is_best=is_best))
        except Stopped:
            return NotUploaded(step, "the process ended before") if self._rank == 0 else None
        except (ShardyardError, OSError) as error:
            return self._failed(step, folder, error)
        not_removed = None if keep_older else self._prune(folder)
        seconds = time.monotonic() - started
        to = f"{self.bucket.location}/{folder}"
        return Uploaded(step, seconds, manifest.bytes, to, not_removed)

    def _send_own(self, manifest: Manifest, path: Path, folder: str) -> None:
        own = [f"rank-{self._rank:05d}.safetensors", *([VALUES] if self._rank == 0 else [])]
        there = self._retried(lambda: self.bucket.files(folder))
        self._retried(lambda: self.bucket.forget_failure(folder, self._rank, there))
        for name in own:
            digest = manifest.files.get(name)
            if digest is None or there.get(name) == digest.bytes:
                continue  # a rank without a part of the state, or sent before a restart
            self._retried(
                lambda name=name: self.bucket.store.upload(  # type: ignore[misc]
                    f"{folder}/{name}", path / name, is_stopped=self._stop.is_set
                )
            )

    def _wait_for_others(self, manifest: Manifest, folder: str, *, own_s: float) -> None:
        """Return when all files are there.

        Raises:
            CheckpointError: Another rank could not send its own, or takes far longer than this one.
        """
        wanted = {name: digest.bytes for name, digest in manifest.files.items()}
        until_s = time.monotonic() + max(_WAIT_S, 5 * own_s)
        while True:
            there = self._retried(lambda: self.bucket.files(folder))
            missing = sorted(name for name, size in wanted.items() if there.get(name) != size)
            if not missing:
                return
            if failures := self.bucket.take_failures(folder, there):
                raise CheckpointError("; ".join(failures))
            if time.monotonic() > until_s:
                raise LostError(f"{', '.join(missing[:4])} did not come from their ranks in time")
            if self._stop.wait(_LOOK_S):
                raise Stopped(folder)

    def _check_lease(self) -> None:
        if self._lease is not None and self._lease.is_lost:
            raise CheckpointError(
                f"another training of this run has taken over {self.bucket.location}. End one of "
                "the two"
            )

    def _prune(self, folder: str) -> str | None:
        """Remove old checkpoints; why some are still there, None: they are gone."""
        try:
            self._retried(lambda: self.bucket.prune(self._keep_last, latest=folder))
        except ShardyardError as error:
            return f"old checkpoints stay in the bucket until the next upload: {error}"
        except Stopped:
            return None  # the next run of this process removes them
        return None

    def _failed(self, step: int, folder: str, error: Exception) -> NotUploaded | None:
        if self._rank == 0:
            return NotUploaded(step, str(error))
        warn(f"rank {self._rank} could not upload its part of step {step}: {error}")
        if folder:
            try:
                self.bucket.write_failure(folder, self._rank, str(error))
            except ShardyardError:
                return None  # rank 0 waits for its file in vain, and says so
        return None

    def _retried(self, ask: Callable[[], T]) -> T:
        """Ask again where that failed: throttled, cut off, credentials about to be renewed."""
        for number in range(1, _TRIES):
            try:
                return ask()
            except (ShardyardError, OSError):
                longest = backoff_s(number, first_s=1.0, longest_s=_LONGEST_PAUSE_S)
                # All ranks fail at once where a store is busy, and must not come back at once.
                if self._stop.wait(random.uniform(0.5, 1.0) * longest):
                    raise Stopped("upload") from None
        return ask()


def _read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Return a manifest and its bytes.

    Raises:
        OSError: It cannot be read; on a shared file system, perhaps not yet.
        CheckpointError: It is damaged.
    """
    content = (path / MANIFEST).read_bytes()
    return read_manifest(path), content
