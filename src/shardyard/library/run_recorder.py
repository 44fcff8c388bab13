"""Events and metrics of a script's run, in the form of every run's, while its loop runs.

Rank 0 writes. Other ranks keep the same counts and write nothing, but each rank that fails
writes why into a file of its own, so that rank 0 can name the first cause.
"""

import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardyard.config.secrets import redact
from shardyard.errors import EXIT_DRAINED, LostRankError, StorageError
from shardyard.io.files import read_json_object, write_json
from shardyard.parallel.device import available_device, peak_memory_bytes
from shardyard.rundir.jsonl import EventWriter, LineWriter
from shardyard.rundir.layout import RunDir

_NULL_KEYS = (
    "epoch", "lr", "tokens", "samples", "step_time_s", "checkpoint_blocked_s", "tokens_per_s",
    "samples_per_s", "tokens_per_s_per_device", "peak_memory_bytes",
)  # fmt: skip
"""Keys of every step's line, null where nothing is known."""
_MOST_REASON = 1000
"""Characters of an error in an event; the script's own output has all of it."""
_OF_PEERS = re.compile(
    r"(?i)connection (was )?(closed|reset|refused|abort)|broken pipe|timed? ?out|gloo"
)
"""Words of errors that the loss of another rank causes."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Error with which one rank left the loop."""

    rank: int
    node: str
    failed_t: float
    """Unix seconds."""
    error: str
    is_of_peers: bool
    """Whether it looks like the loss of another rank."""


class RunRecorder:
    """Writer of one attempt of a script's run."""

    def __init__(
        self, run_dir: RunDir, attempt: int, *, workers: list[dict[str, Any]], rank: int
    ) -> None:
        """Open the files on rank 0.

        Args:
            workers: ``rank``, ``node`` and ``pid`` of every rank.
        """
        self.run_dir = run_dir
        self.attempt = attempt
        self.durable_step: int | None = None
        """Step of the newest checkpoint that is durable."""
        self.finish_saves: Callable[[], None] | None = None
        """Waits for a checkpoint that is being written; None: none is."""
        self.remaining_steps: int | None = None
        """Steps that a loop of ``steps`` has still to do; None: there is no such loop."""
        self._workers = workers
        self._rank = rank
        self._owner = os.getpid()
        self._lines = LineWriter(run_dir.metrics) if rank == 0 else None
        self._events: EventWriter | None = None
        if rank == 0:
            self._events = EventWriter(run_dir.events, attempt=attempt, generation=0)
        self._device = torch.device(available_device())
        self._started_s = self._since_s = time.monotonic()
        self._blocked_s = 0.0
        self._first_step = 0 if attempt == 0 else None
        """Step before the first one of this attempt; None: not known yet."""
        self._last: dict[str, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether the run has not ended, seen from the process that began it."""
        return not self._is_over and os.getpid() == self._owner

    _is_over = False

    @property
    def step(self) -> int | None:
        """Step of the newest line; None: there is none."""
        return self._last.get("step")

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event, on rank 0."""
        if self._events is not None and self.is_open:
            self._events.write(kind, **fields)

    def begin(self, *, name: str, tags: Mapping[str, str]) -> None:
        """Write that an attempt has started, with all its ranks."""
        if self.attempt == 0:
            self.event("run_started", run=self.run_dir.run_id, name=name, tags=dict(tags))
        facts = {"workers": self._workers, "world_size": len(self._workers)}
        self.event("attempt_started", **facts)
        self.event("rendezvous", seconds=0.0, **facts)

    def loaded(self, step: int, **fields: Any) -> None:
        """Write from which checkpoint the loop continues."""
        self._first_step = self.durable_step = step
        self.event("checkpoint_loaded", step=step, **fields)

    def ready(self, *, last_step: int, parameters: int | None) -> None:
        """Write that the first step begins, and the step with which the loop ends."""
        self._first_step = self._first_step or 0
        self.remaining_steps = last_step - self._first_step
        told = {} if parameters is None else {"parameters": parameters}
        now_s = time.monotonic()
        self.event("model_ready", last_step=last_step, seconds=now_s - self._started_s, **told)
        self._since_s = now_s

    def save_started(self, step: int, blocked_s: float) -> None:
        """Write a save, and leave its pause out of the time of steps."""
        self.event("checkpoint_started", step=step, blocked_s=blocked_s)
        self._blocked_s += blocked_s
        self._since_s += blocked_s

    def save_ended(self, step: int, **fields: Any) -> None:
        """Write that a checkpoint is durable."""
        self.durable_step = step
        self.event("checkpoint_durable", step=step, **fields)

    def log(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Write the line of a step."""
        now_s = time.monotonic()
        seconds, ranks = max(0.0, now_s - self._since_s), len(self._workers)
        before = self._last.get("step", self._first_step)
        steps = 1 if before is None else max(1, step - before)
        line: dict[str, Any] = {"step": step, **dict.fromkeys(_NULL_KEYS), **numbers}
        line |= {"step_time_s": seconds / steps, "checkpoint_blocked_s": self._blocked_s}
        for name in ("tokens", "samples"):
            rate = self._rate(name, line[name], seconds)
            line[f"{name}_per_s"] = rate if line[f"{name}_per_s"] is None else line[f"{name}_per_s"]
        if line["tokens_per_s"] is not None:
            line["tokens_per_s_per_device"] = line["tokens_per_s"] / ranks
        if line["peak_memory_bytes"] is None:
            line["peak_memory_bytes"] = peak_memory_bytes(self._device) or None
        line |= {"attempt": self.attempt, "generation": 0, "world_size": ranks}
        if self._lines is not None and self.is_open:
            self._lines.append(line)
        if not self._last:
            self.event("first_step", step=step, seconds=seconds)
        self._since_s, self._blocked_s, self._last = now_s, 0.0, line

    def log_evaluation(self, step: int, scores: Mapping[str, float | None]) -> None:
        """Write the line of an evaluation that took the time since the last line."""
        now_s = time.monotonic()
        if self._lines is not None and self.is_open:
            self._lines.append({"step": step, "eval": dict(scores)})
        self.event("evaluated", step=step, seconds=max(0.0, now_s - self._since_s), **scores)
        self._since_s = now_s

    def fail(self, error: BaseException, *, exit_code: int) -> None:
        """End with the first cause: this rank's error, or that of the rank that failed before."""
        if not self.is_open:
            return
        own = RankFailure(
            rank=self._rank,
            node=self._workers[self._rank]["node"],
            failed_t=time.time(),
            error=_describe(error),
            is_of_peers=isinstance(error, LostRankError | dist.DistError)
            or (isinstance(error, RuntimeError) and _OF_PEERS.search(str(error)) is not None),
        )
        if self._rank > 0:
            with suppress(StorageError, OSError):
                write_json(self.run_dir.failure(self.attempt, self._rank), asdict(own))
            self._wait_for_save()
            self.close()
            return
        self._wait_for_save()
        first = self._first_cause(own)
        if first is not own:
            self._report_lost(first)
        reason = first.error if first is own else f"rank {first.rank}: {first.error}"
        if first.is_of_peers and len(self._workers) > 1:
            reason = f"another rank was lost without a word: {reason}"
        self.end("failed", reason, exit_code=exit_code)

    def stop(self, signal_name: str, *, exit_code: int) -> None:
        """End because of a signal: drained if the last step is durable, else failed."""
        if not self.is_open:
            return
        self.event("draining", signal=signal_name)
        self._wait_for_save()
        self._stop(signal_name, exit_code=exit_code)

    def leave(self) -> None:
        """End because the script has left its block without an error.

        A loop of ``steps`` that was left before its last step is to be continued.
        """
        if not self.is_open:
            return
        if not self.remaining_steps:
            self.finish("the script has left its run")
            return
        self._wait_for_save()
        self._stop("the loop was left early,", exit_code=EXIT_DRAINED)

    def _stop(self, cause: str, *, exit_code: int) -> None:
        failed = self._failures()
        if failed:  # torchrun stops the others when a rank fails
            self._report_lost(failed[0])
            reason = f"rank {failed[0].rank}: {failed[0].error}"
            self.end("failed", reason, exit_code=1)
            return
        step, durable = self.step or 0, self.durable_step or 0
        is_durable = 0 < step <= durable
        kept = f"the newest checkpoint is of step {durable}" if durable else "no checkpoint is kept"
        reason = f"{cause} after step {step}; {kept}"
        self.end("drained" if is_durable else "failed", reason, exit_code=exit_code)

    def finish(self, reason: str) -> None:
        """End as finished: the next start of the script begins a new run."""
        if self.is_open:
            self._wait_for_save()
            last = {key: self._last.get(key) for key in ("step", "tokens", "loss")}
            self.event("run_finished", **last, seconds=0.0)
            self.end("finished", reason, exit_code=0)

    def end(self, outcome: str, reason: str, *, exit_code: int) -> None:
        """Write the final event, and close the files."""
        self.event("attempt_ended", outcome=outcome, reason=reason, exit_code=exit_code)
        self.close()

    def close(self) -> None:
        """Close the files; safe to repeat."""
        if not self.is_open:
            return
        self._is_over = True
        for writer in (self._events, self._lines):
            if writer is not None:
                writer.close()

    def _wait_for_save(self) -> None:
        """Wait for a save that is being written: it counts, whatever ends the loop."""
        if self.finish_saves is not None:
            self.finish_saves()

    def _rate(self, name: str, count: float | None, seconds: float) -> float | None:
        """Tokens or samples per second; None in the first line after a restart."""
        before = self._last.get(name) if self._last or self.attempt > 0 else 0
        if count is None or before is None or seconds <= 0:
            return None
        return (count - before) / seconds

    def _first_cause(self, own: RankFailure) -> RankFailure:
        others = self._failures()
        if own.is_of_peers:
            return others[0] if others else own
        return min([own, *others], key=lambda each: each.failed_t)

    def _failures(self) -> list[RankFailure]:
        """Failures of other ranks that are no loss of a peer, the first one first."""
        failures = []
        for worker in self._workers[1:]:
            with suppress(OSError, ValueError, TypeError):
                path = self.run_dir.failure(self.attempt, worker["rank"])
                failures.append(RankFailure(**read_json_object(path)))
        causes = [each for each in failures if not each.is_of_peers]
        return sorted(causes, key=lambda each: each.failed_t)

    def _report_lost(self, failure: RankFailure) -> None:
        place = {"rank": failure.rank, "node": failure.node, "cause": failure.error}
        steps = {"step": self.step, "durable_step": self.durable_step}
        self.event("worker_lost", **place, **steps, exit_code=1)


def _describe(error: BaseException) -> str:
    """An error in a line: its type, its message and the line of the script where it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    words = " ".join(str(error).split())[:_MOST_REASON]
    return redact(f"{type(error).__name__}: {words}" if words else type(error).__name__) + where


@dataclass
class _Active:
    recorder: RunRecorder | None = None


_active = _Active()


def active_recorder() -> RunRecorder | None:
    """Return the recorder of the run in whose block this process is; None: it is in none."""
    found = _active.recorder
    return found if found is not None and found.is_open else None


def recorder_of(folder: str | Path) -> RunRecorder | None:
    """Return the active recorder if a folder is that of its run's checkpoints."""
    found = active_recorder()
    if found is None or Path(folder).resolve() != found.run_dir.checkpoints.resolve():
        return None
    return found


def activate(recorder: RunRecorder | None) -> None:
    """Let the library report to a recorder; None: to none."""
    _active.recorder = recorder
