"""Save a checkpoint while training continues.

``save`` copies this rank's shards into host memory and returns; a thread writes them. The thread
has its own process group, because collectives of two threads on one group would mix. ``poll``
reports success or failure at the same call on every rank. The threads agree on the call by one
small all-reduce, so that either all ranks continue or all of them stop.
"""

import json
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardyard.checkpoint.io_priority import yield_to_training
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.safetensors_writer import DTYPES
from shardyard.checkpoint.staging import HostCopy
from shardyard.checkpoint.staging_protocol import Staging
from shardyard.checkpoint.upload_protocol import UploadQueue
from shardyard.checkpoint.writer import CheckpointWriter, SaveRequest, ShardPlanner
from shardyard.errors import CheckpointError, LostRankError, NotFiniteError, StorageError
from shardyard.parallel.device import synchronize_stream

_TOLD_RANKS = 4
"""Ranks whose tensors are named when a state is not finite."""


@dataclass(frozen=True)
class Abandoned:
    """Save that was given up as the state was not finite; earlier checkpoints remain."""

    step: int
    reason: str
    """Tensors that are not finite on each rank, and what they hold."""


@dataclass(frozen=True)
class Durable:
    """A checkpoint that survives from now on."""

    step: int
    seconds: float
    """From the call of ``save`` until ``latest`` named it."""
    bytes: int
    """Files of all ranks together."""
    not_removed: str | None = None
    """Why old checkpoints are still there, and what to do; None: all are gone."""


class Saver:
    """Writer of one run's checkpoints, one at a time. All ranks make the same calls.

    Args:
        checkpoints_dir: Folder that all ranks see; made if missing.
        group: A gloo group of all ranks for only this: ``new_group(backend="gloo")``.
        keep_last: Newest checkpoints kept; the one that ``best`` names stays too.
        staging: Memory to which the state is copied; None: the saver's own.
        uploads: Takes durable checkpoints to a bucket.
    """

    def __init__(
        self,
        checkpoints_dir: Path,
        *,
        group: dist.ProcessGroup,
        rank: int,
        world_size: int,
        keep_last: int,
        staging: Staging | None = None,
        uploads: UploadQueue | None = None,
    ) -> None:
        self._dir = checkpoints_dir
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._keep_last = keep_last
        self._staging = staging or HostCopy()
        self._uploads = uploads
        self._planner = ShardPlanner()
        # One worker: two saves at a time would mix their collectives on the one group.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="checkpoint", initializer=yield_to_training
        )
        self._running: Future[Durable | Abandoned] | None = None
        self._unreported: list[Durable | Abandoned] = []
        self._lock = threading.Lock()  # guards the two below
        self._polls = 0
        self._report_at: Future[int] | None = None

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        *,
        is_best: bool = False,
        keep_older: bool = False,
    ) -> float:
        """Begin a save; the tensors may change as soon as this returns.

        Waits for an earlier save that is still running.

        Args:
            tensors: Tensors and DTensors by name, the same names on every rank.
            values: Everything else, as JSON has it; rank 0's are written.
            is_best: Let ``best`` name this checkpoint once it is durable.
            keep_older: Remove no older checkpoint this time.

        Returns:
            Seconds that training stood still: waiting and copying. Work that was already queued
            on the device is not counted.

        Raises:
            CheckpointError: The earlier save failed, or a tensor's dtype cannot be stored.
        """
        # Checked before the thread has it: an error there would surface some steps later.
        _check_dtypes(tensors)
        # Encoded now, as the caller may change the values meanwhile. NaN is not part of JSON, and
        # Python would write it all the same.
        values_json = json.dumps(values, indent=1, allow_nan=False) + "\n"
        # The device finishes the step first, so that the seconds below are those of the copy.
        for device in {tensor.device for tensor in tensors.values()}:
            synchronize_stream(device)
        started = time.monotonic()
        # The save that is still running reads the buffers into which this one copies.
        self.wait()
        self._planner.describe(tensors, self._staging.take_for_save(step, tensors, values_json))
        order = SaveRequest(
            checkpoints_dir=self._dir,
            step=step,
            values_json=values_json,
            keep_last=None if keep_older else self._keep_last,
            is_best=is_best,
            world_size=self._world_size,
            started=started,
        )
        self._running = self._thread.submit(self._write_and_agree, order)
        return time.monotonic() - started

    def poll(self) -> list[Durable | Abandoned]:
        """Return the outcomes of saves since the last call. Call it once a step, on every rank.

        Raises:
            CheckpointError: A save failed; raised at the same call on every rank.
        """
        with self._lock:
            self._polls += 1
            polls, report_at = self._polls, self._report_at
        if report_at is not None and polls >= report_at.result():
            self.wait()
        reports, self._unreported = self._unreported, []
        return reports

    def wait(self) -> None:
        """Wait for a running save; the next ``poll`` reports it.

        Raises:
            CheckpointError: The save failed.
        """
        running, self._running = self._running, None
        if running is None:
            return
        try:
            self._unreported.append(running.result())
        finally:
            with self._lock:
                self._report_at = None

    def close(self) -> None:
        """End the thread, after a running save. A failure of that save is not raised here."""
        self._thread.shutdown(wait=True)

    def _write_and_agree(self, request: SaveRequest) -> Durable | Abandoned:
        """In the thread: write, then agree with the other ranks on the poll that reports it."""
        try:
            outcome = self._write(request)
            self._agree()
        except RuntimeError as error:  # what gloo raises when a connection breaks
            with self._lock:
                self._report_at = self._report_at or Future()
                # 0 is below the number of any poll, as the ranks that are left cannot agree on one.
                self._report_at.set_result(0)
            raise LostRankError(
                f"{request.folder} was not saved: the ranks lost contact during the save "
                f"({error}). Another process died or its node is gone; its own log says why. When "
                "you resume the run, it continues from the newest durable checkpoint."
            ) from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    def _write(self, order: SaveRequest) -> Durable | Abandoned | CheckpointError:
        """Returns the same on every rank."""
        writer = CheckpointWriter(order, self._planner, self._uploads)
        try:
            metadata = dcp_save(
                {},  # the planner has the shards; torch would log each entry, 0.1 ms apiece
                storage_writer=writer,
                planner=self._planner,
                process_group=self._group,
            )
        except CheckpointException as error:
            # Before it raises, torch gathers what every rank came to. No rank still writes there.
            if self._rank == 0:
                shutil.rmtree(order.scratch, ignore_errors=True)  # give the room back
            reason = _not_finite(error)
            return Abandoned(order.step, reason) if reason else _first_failure(error, order.step)
        seconds, size, not_removed, is_uploaded = metadata.storage_data
        if is_uploaded and self._uploads is not None:
            keep_older = order.keep_last is None
            self._uploads.add(order.step, is_best=order.is_best, keep_older=keep_older)
        return Durable(order.step, seconds, size, not_removed)

    def _agree(self) -> None:
        """Fix the number of the poll that reports: one that no rank has begun yet.

        A rank that polls meanwhile waits for the outcome, so none can pass the number without
        noticing.
        """
        with self._lock:
            # Both under one lock: a poll in between would be neither counted nor made to wait.
            polls = torch.tensor(self._polls)
            self._report_at = Future()
        dist.all_reduce(polls, dist.ReduceOp.MAX, group=self._group)
        self._report_at.set_result(int(polls) + 1)


def _not_finite(error: CheckpointException) -> str:
    """Describe non-finite tensors, in order of rank; empty if ranks failed otherwise."""
    causes = {rank: error.failures[rank][0] for rank in sorted(error.failures)}
    if not all(isinstance(cause, NotFiniteError) for cause in causes.values()):
        return ""
    told = [f"rank {rank}: {cause}" for rank, cause in causes.items()]
    return "; ".join(told[:_TOLD_RANKS]) + (
        f"; and {len(told) - _TOLD_RANKS} more ranks" if len(told) > _TOLD_RANKS else ""
    )


def _first_failure(error: CheckpointException, step: int) -> CheckpointError:
    """The failure of the lowest rank, as this package's error."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if isinstance(cause, StorageError):
        return StorageError(str(cause))
    if isinstance(cause, CheckpointError):
        return CheckpointError(f"{step_name(step)} was not saved: {cause}")
    return CheckpointError(
        f"{step_name(step)} was not saved: rank {rank} failed with {type(cause).__name__}: "
        f"{cause}. Earlier checkpoints are intact; resume the run."
    )


def _check_dtypes(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot hold. "
                f"Convert it to one of {', '.join(sorted(str(dtype) for dtype in DTYPES))}."
            )
