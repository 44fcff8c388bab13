"""Profiles of some steps of a run that trains: their requests, start and files.

Rank 0 looks for a request in the run's folder, and the one small all-reduce of a step
carries its request to all ranks (``train/step.py``). So all begin with the same step,
though no rank waits for it. No computation depends on it. An error in a profile ends the
profile, not the run.
"""

import gzip
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from shardyard.config.rules.observe import ranks_of
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.files import make_folder, publish_folder, write_json
from shardyard.io.polling import poll_in_background
from shardyard.observe.step_breakdown import AXES, read_step_terms, table, terms_of
from shardyard.observe.trace import APART, STEPS, exchanges_named, read_trace
from shardyard.parallel.device import synchronize
from shardyard.rundir.profiles import (
    ProfileRequest,
    ProfileSummary,
    drop_request,
    new_request,
    remove_unfinished,
    take_request,
    trace_name,
    unfinished,
)
from shardyard.train.hooks import WorkerPhase
from shardyard.train.training import Training

# The loop calls this interface. Its default takes no profile, so the loop needs no case for it.


class Profiling:
    """All profiles of one training. Every rank calls it at the same steps."""

    @property
    def is_requested(self) -> bool:
        """This rank's wish, which the next step carries to all."""
        return False

    @property
    def is_open(self) -> bool:
        """Whether the step under way is profiled; the same on all ranks."""
        return False

    def polling(self) -> AbstractContextManager[None]:
        """Look for requests while it is open; a profile under way at its end is lost."""
        return nullcontext()

    def before_step(self, step: int, *, is_requested: bool) -> float:  # noqa: ARG002
        """Begin a profile, if one is due.

        Args:
            is_requested: What all ranks have heard in the result of a step.

        Returns:
            Seconds that belong to no step.
        """
        return 0.0

    def outside_steps(self) -> AbstractContextManager[object]:
        """While it is open, what is done is no part of a step."""
        return nullcontext()

    def record_step_time(self, step_time_s: float) -> None:
        """A step took so long."""

    def after_step(self) -> float:
        """Count a step, and end a profile that has all of its own; returns as ``before_step``."""
        return 0.0

    def end(self, *, is_draining: bool, is_last: bool) -> None:
        """End any open profile: no further step of this training comes.

        Args:
            is_draining: Whether the remaining time is for saving.
            is_last: Whether no other phase of the run takes up the request.
        """


NO_PROFILES = Profiling()


LOOK_EVERY_S = 0.5
"""Seconds between looks for a request.

Each is one stat of a file that is usually missing, next to the training thread.
"""
MOST_TRACE_BYTES = 2**30
"""Most bytes of one rank's trace, before it is packed.

No viewer opens more, and reading it takes ten times that memory.
"""
_USUAL_STEPS = 20
_PACKED = 4
"""Level of gzip: the ranks wait while it packs."""


@dataclass
class _ActiveProfile:
    """A profile that is under way."""

    request: ProfileRequest
    first_step: int
    ranks: tuple[int, ...]
    median_s: float | None
    steps_done: int = 0
    includes_this_rank: bool = False
    """Whether this rank is profiled."""
    error: str = ""
    """Why this rank has no trace."""
    paused_s: float = 0.0
    open: ExitStack = field(default_factory=ExitStack)
    profiler: Any = None


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Part of a profile on one rank; small, it goes to all ranks."""

    terms: dict[str, float]
    bytes: int
    error: str


class Profiles(Profiling):
    """Takes those that the recipe and requests ask for."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._attempt = training.metric_lines.attempt
        self._active: _ActiveProfile | None = None
        self._step_times_s: deque[float] = deque(maxlen=_USUAL_STEPS)
        self._request: ProfileRequest | None = None
        """Request to rank 0; started with the next step, once all ranks know it."""
        self._paused_s = 0.0
        """Seconds of standstill in the current call."""
        if training.rank == 0:
            self._remove_stale()

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Watch for requests, see Profiling."""
        looks = (
            poll_in_background(self._poll_request, every_s=LOOK_EVERY_S, name="profile-requests")
            if self._training.rank == 0
            else nullcontext()
        )
        try:
            with looks:
                yield
        finally:
            if self._active is not None:
                self._active.open.close()

    @property
    def is_requested(self) -> bool:
        """Whether a profile is requested, see Profiling."""
        return self._request is not None and self._active is None

    @property
    def is_open(self) -> bool:
        """Whether a profile is under way, see Profiling."""
        return self._active is not None

    def before_step(self, step: int, *, is_requested: bool) -> float:
        """Begin a profile that is due, see Profiling. All ranks call it together."""
        if self._active is not None:
            return 0.0
        self._paused_s = 0.0
        asked = self._training.resolved.recipe.observe.profile
        if asked.at_step == step:
            self._begin(new_request(self._attempt, steps=asked.steps, ranks=asked.ranks), step)
        elif is_requested:
            # All ranks are here at the same step: its all-reduce brought the request to each.
            request: ProfileRequest | None = self._training.gather(self._request)[0]
            if request is not None:
                self._begin(request, step)
        return self._paused_s

    def outside_steps(self) -> AbstractContextManager[object]:
        """Mark work outside the step, see Profiling."""
        return record_function(APART) if self._active is not None else nullcontext()

    def record_step_time(self, step_time_s: float) -> None:
        """Record a step's time, see Profiling."""
        if self._active is None:
            self._step_times_s.append(step_time_s)

    def after_step(self) -> float:
        """Count a profiled step, and end a full profile; see Profiling.

        All ranks call it together.
        """
        taking = self._active
        if taking is None:
            return 0.0
        self._paused_s = 0.0
        taking.steps_done += 1
        if taking.steps_done >= taking.request.steps:
            self._end(taking)
        return self._paused_s

    def end(self, *, is_draining: bool, is_last: bool) -> None:
        """End an open profile, see Profiling. All ranks call it together."""
        taking = self._active
        # The time that a drain leaves is for the checkpoint: packing a trace would take it.
        if taking is not None and (is_draining or not taking.steps_done):
            why = "the run was asked to stop" if is_draining else "the run ended"
            taking.open.close()
            self._active = None
            self._abandon(taking.request, f"{why} in the middle of it", step=taking.first_step)
        elif taking is not None:
            self._end(taking)
        if self._training.rank == 0 and (is_draining or is_last):
            self._poll_request()  # a request of this moment is reported too
        if self._request is not None and (is_draining or is_last):
            why = "was asked to stop" if is_draining else "ended"
            self._abandon(self._request, f"the run {why} before another step began")

    # --- requests, on rank 0 --------------------------------------------------------------------

    def _poll_request(self) -> None:
        if self._request is None and self._active is None:
            request = take_request(self._training.run_dir)
            if request is not None and request.attempt == self._attempt:
                self._request = request

    def _remove_stale(self) -> None:
        """Remove what a kill has left of a profile, and a request that it was taken for."""
        run_dir = self._training.run_dir
        left, request = remove_unfinished(run_dir), take_request(run_dir)
        if request is None:
            return
        if request.attempt != self._attempt:
            drop_request(run_dir)
        elif left:
            self._abandon(request, "processes were lost in the middle of it; its part was removed")

    def _abandon(self, request: ProfileRequest, reason: str, step: int | None = None) -> None:
        """Report that a request is dropped."""
        training = self._training
        if training.rank != 0:
            return
        if step is not None:
            shutil.rmtree(unfinished(training.run_dir.profile(step)), ignore_errors=True)
        training.report("profile_abandoned", id=request.id, reason=reason)
        self._forget(request)

    def _forget(self, request: ProfileRequest) -> None:
        found = take_request(self._training.run_dir)
        if found is not None and found.id == request.id:
            drop_request(self._training.run_dir)
        if self._request is not None and self._request.id == request.id:
            self._request = None

    # --- one profile ----------------------------------------------------------------------------

    def _begin(self, request: ProfileRequest, step: int) -> None:
        training = self._training
        try:
            ranks = ranks_of(request.ranks, training.world_size)
        except RequestError as error:  # the same on every rank
            self._abandon(request, str(error))
            return
        usual_s = median(self._step_times_s) if self._step_times_s else None
        taking = _ActiveProfile(
            request, step, ranks, usual_s, includes_this_rank=training.rank in ranks
        )
        with self._paused(taking):
            if training.rank == 0:  # marks from now on that this request is under way
                taking.error = self._create_folder(unfinished(training.run_dir.profile(step)))
            if taking.includes_this_rank and not taking.error:
                self._open(taking)
        self._active = taking

    def _create_folder(self, folder: Path) -> str:
        try:
            make_folder(folder)
        except OSError as error:
            return f"{folder} cannot be made: {error.strerror}"
        return ""

    def _open(self, active: _ActiveProfile) -> None:
        """Let the profiler run, and a range around the steps."""
        try:
            active.profiler = profile(activities=_activities(self._training.device))
            active.profiler.start()
            # The stack closes backwards: ranges end before the profiler stops, so none is cut.
            active.open.callback(active.profiler.stop)
            active.open.enter_context(exchanges_named(self._axes()))
            active.open.enter_context(record_function(STEPS))
        except (RuntimeError, OSError) as error:
            active.error = f"the profiler did not start: {error}"

    def _axes(self) -> dict[str, list[str]]:
        """Return process group name -> its mesh axes with several ranks, on this rank."""
        mesh = self._training.mesh
        axes_by_group: dict[str, list[str]] = {}
        for each in (mesh.dense, mesh.experts, mesh.context):
            for place, axis in enumerate(() if each is None else each.mesh_dim_names or ()):
                if each is None or each.size(place) == 1 or axis not in AXES:
                    continue
                axes = axes_by_group.setdefault(each.get_group(axis).group_name, [])
                axes += [] if axis in axes else [axis]
        return axes_by_group

    def _end(self, active: _ActiveProfile) -> None:
        """Write what this rank has, and on rank 0 what all have. All ranks call it together."""
        training, self._active = self._training, None
        folder = training.run_dir.profile(active.first_step)
        with self._paused(active):
            # Kernels of the profiled steps may still be queued, and the trace must have their ends.
            synchronize(training.device)
            part = self._written(active, unfinished(folder))
            parts: list[_Part | None] = training.gather(part)
        if training.rank != 0:
            return
        try:
            with self._paused(active):
                self._publish(active, parts, folder)
        except (OSError, ShardyardError) as error:  # of a disk that is full
            self._abandon(active.request, f"it could not be written: {error}", active.first_step)

    def _written(self, active: _ActiveProfile, folder: Path) -> _Part | None:
        """This rank's trace, packed, and what it says; None: it is not profiled."""
        if not active.includes_this_rank:
            return None
        terms: dict[str, float] = {}
        path = folder / trace_name(self._training.rank)
        try:
            active.open.close()
            if not active.error:
                plain = path.with_suffix("")
                active.profiler.export_chrome_trace(str(plain))
                size = plain.stat().st_size
                if size > MOST_TRACE_BYTES:
                    raise ValueError(f"its trace has {size:,} bytes; ask for fewer steps")
                terms = terms_of(read_trace(plain), steps=active.steps_done)
                with plain.open("rb") as read, gzip.open(path, "wb", _PACKED) as packed:
                    shutil.copyfileobj(read, packed)
                plain.unlink()
        except (RuntimeError, OSError, ValueError) as error:
            # Not raised: the other ranks are on their way into gather(), and would wait there.
            active.error = str(error) or type(error).__name__
        finally:
            path.with_suffix("").unlink(missing_ok=True)
        size = 0 if active.error else path.stat().st_size
        return _Part(terms={} if active.error else terms, bytes=size, error=active.error)

    def _publish(self, active: _ActiveProfile, parts: list[_Part | None], folder: Path) -> None:
        training = self._training
        there = {rank: part for rank, part in enumerate(parts) if part is not None}
        by_rank = {rank: part.terms for rank, part in there.items() if not part.error}
        missing = {str(rank): part.error for rank, part in there.items() if part.error}
        if not by_rank:
            why = "; ".join(f"rank {rank}: {error}" for rank, error in missing.items())
            self._abandon(active.request, f"no rank has a trace: {why}", active.first_step)
            return
        plan = training.run_dir.plan(self._attempt)
        found = ProfileSummary(
            id=active.request.id,
            step=active.first_step,
            steps=active.steps_done,
            attempt=self._attempt,
            world_size=training.world_size,
            ranks=tuple(by_rank),
            step_s=sum(sum(terms.values()) for terms in by_rank.values()) / len(by_rank),
            usual_s=active.median_s,
            stood_still_s=active.paused_s,
            trace_bytes=sum(part.bytes for part in there.values()),
            missing=missing,
            terms=table(by_rank, read_step_terms(plan, training.progress.phase)),
        )
        write_json(
            unfinished(folder) / "profile.json",
            {**found.to_json(), "by_rank": {str(rank): terms for rank, terms in by_rank.items()}},
        )
        shutil.rmtree(folder, ignore_errors=True)  # of the same step, before work was lost
        publish_folder(unfinished(folder), folder)
        training.report("profiled", id=found.id, step=found.step, profile=found.to_json())
        self._forget(active.request)

    @contextmanager
    def _paused(self, active: _ActiveProfile) -> Iterator[None]:
        began_s = time.monotonic()
        with self._training.hooks.heartbeat.during(WorkerPhase.PROFILE):
            yield
        seconds = time.monotonic() - began_s
        active.paused_s += seconds
        self._paused_s += seconds


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities to record in a process that computes on this device."""
    if device.type == "cpu":
        return [ProfilerActivity.CPU]
    return list(supported_activities())  # type: ignore[no-untyped-call]
