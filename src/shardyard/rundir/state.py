"""State of a run and what it has cost so far, read only from its folder.

- new: no attempt was started yet.
- running: a process holds the lease.
- draining: it was asked to stop and is making its last step durable.
- finished: all steps are done.
- drained: stopped by SIGTERM or Ctrl-C with its last step durable; can be resumed without loss.
- failed: the last attempt ended with an error, or was stopped before its last step was durable.
- lost: the last attempt ended without a final event (killed, machine gone); can be resumed.
- unreadable: a file of its folder cannot be read, or is a pipe or a folder (in lists only).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, StorageError
from shardyard.rundir.jsonl import latest_steps, read_lines, read_lines_backwards
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    """Node without which the newest attempt continues, or continued."""

    node: str
    node_rank: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One row of `shardyard runs`."""

    id: str
    state: str
    step: int | None
    """The newest one that counts: none of those that were lost."""
    loss: float | None
    updated_at: float | None
    """Unix seconds of the last change in events.jsonl or metrics.jsonl."""
    stop_reason: str | None = None
    """Why the newest attempt stopped itself."""
    end_reason: str | None = None
    """Reason in the final event of the newest attempt, once it has ended."""
    no_step_s: float | None = None
    """Seconds without a new step, where the run has noticed that none comes."""
    usual_step_s: float | None = None
    """Usual seconds of a step before that."""
    phase: int | None = None
    """Phase of that step, from 1, in a run with phases."""
    tokens_per_s: float | None = None
    """Tokens per second of that step, all ranks."""
    left_out: tuple[ExcludedNode, ...] = ()
    started_from: str | None = None
    """Run and step whose weights it started from."""
    problem: str | None = None
    """Why the folder cannot be read, in the state `unreadable`."""


_TELLING = (
    "attempt_started", "draining", "run_finished", "attempt_ended", '"stalled"', '"stopping"',
    '"node_left_out"',
)  # fmt: skip


def read_state(run_dir: RunDir, *, is_training_remotely: bool = False) -> RunState:
    """State of one run, from its events, metrics and lease.

    Args:
        is_training_remotely: Known from its scheduler, where the lease is out of reach.
    """
    # read from their ends, so that a long list of long runs is quick
    events_file, metrics_file = run_dir.events, run_dir.metrics
    step = next(latest_steps(metrics_file), None)
    events = _latest_events(events_file)
    is_leased = is_training_remotely or is_locked(run_dir.lease)
    no_step_s, usual_step_s = _stall(events) if is_leased else (None, None)
    return RunState(
        id=run_dir.run_id,
        state=state_of(events, is_leased=is_leased),
        step=step["step"] if step else None,
        loss=step.get("loss") if step else None,
        updated_at=max(_changed_t(events_file), _changed_t(metrics_file)) or None,
        stop_reason=_stop_reason(events),
        end_reason=None if is_leased else _end_reason(events),
        no_step_s=no_step_s,
        usual_step_s=usual_step_s,
        phase=step.get("phase") if step else None,
        tokens_per_s=step.get("tokens_per_s") if step else None,
        left_out=tuple(_excluded_nodes(events)),
        started_from=next(read_lines(events_file), {}).get("started_from"),
    )


def read_state_in_list(run_dir: RunDir) -> RunState:
    """The same for one of many runs: a folder that cannot be read does not hide the others."""
    try:
        return read_state(run_dir)
    except (OSError, StorageError, ValueError) as error:
        return unreadable(run_dir, error)


def unreadable(run_dir: RunDir, error: Exception) -> RunState:
    """State of a run whose folder cannot be read."""
    return RunState(
        id=run_dir.run_id,
        state="unreadable",
        step=None,
        loss=None,
        updated_at=None,
        problem=str(error),
    )


def resume_words(run_dir: RunDir) -> str:
    """The command that continues a run, and from where, as far as its folder here says."""
    command = f"`shardyard resume {run_dir.handle}`"
    if not run_dir.attempts():  # its folder may be on the cluster
        return f"{command} continues from the newest durable checkpoint, if there is one"
    steps = run_dir.checkpoint_steps()
    if not steps:
        return f"{command} begins again at step 0, as no checkpoint is durable"
    return f"{command} continues from the checkpoint of step {steps[-1]}"


def _changed_t(path: Path) -> float:
    """Unix seconds at which a file was changed last; 0 for one that is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def end_of_attempt(run_dir: RunDir, attempt: int) -> dict[str, Any] | None:
    """Return the event by which a node ended an attempt for all; None: it runs, or was lost."""
    ends = read_lines_backwards(run_dir.events, with_any=('"attempt_ended"',))
    of_attempt = (event for event in ends if event.get("attempt") == attempt)
    return next((event for event in of_attempt if event["kind"] == "attempt_ended"), None)


def has_attempt_ended(run_dir: RunDir, attempt: int) -> bool:
    """Whether a node ended an attempt for all of them: the others were not lost."""
    return end_of_attempt(run_dir, attempt) is not None


def _excluded_nodes(events: Sequence[dict[str, Any]]) -> Iterator[ExcludedNode]:
    for event in events:
        if event["kind"] == "node_left_out" and type(event.get("node_rank")) is int:
            yield ExcludedNode(
                node=str(event.get("node")),
                node_rank=event["node_rank"],
                cause=str(event.get("cause")),
            )


def _stop_reason(events: Sequence[dict[str, Any]]) -> str | None:
    said = next((event for event in reversed(events) if event["kind"] == "stopping"), None)
    return None if said is None or "reason" not in said else str(said["reason"])


def _end_reason(events: Sequence[dict[str, Any]]) -> str | None:
    ended = next((event for event in reversed(events) if event["kind"] == "attempt_ended"), None)
    return None if ended is None or not ended.get("reason") else str(ended["reason"])


def _stall(events: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Return seconds since the last step and usual seconds of a step; None where steps come."""
    said = next((event for event in reversed(events) if event["kind"] == "stalled"), None)
    if said is None or not said.get("seconds") or said.get("t") is None:
        return None, None
    since_s = max(0.0, time.time() - said["t"])  # the node's clock may be ahead
    return since_s + said["seconds"], said.get("usual_s")


def _latest_events(file: Path) -> list[dict[str, Any]]:
    """Events of the newest attempt that decide its state, in order."""
    events: list[dict[str, Any]] = []
    started = None
    for event in read_lines_backwards(file, with_any=_TELLING):
        # A run that starts slowly can reach a limit, and say why it stops, before it has started.
        if started is not None and event.get("attempt") != started:
            break
        events.append(event)
        if event.get("kind") == "attempt_started":
            started = event.get("attempt")
            if started is None:
                break
    return events[::-1]


def state_of(events: Sequence[dict[str, Any]], *, is_leased: bool) -> str:
    """The word for a run's state; see the table at the top of this file."""
    last = {event["kind"]: place for place, event in enumerate(events)}
    started = last.get("attempt_started", -1)
    if is_leased:
        return "draining" if last.get("draining", -1) > started else "running"
    if last.get("run_finished", -1) > started:
        return "finished"
    ended = last.get("attempt_ended", -1)
    if ended > started:
        return _word_for(events[ended])
    return "lost" if started >= 0 else "new"


def _word_for(attempt_ended: dict[str, Any]) -> str:
    if attempt_ended.get("exit_code") not in (EXIT_DRAINED, EXIT_INTERRUPTED):
        return "failed"
    return str(attempt_ended.get("outcome", "drained"))


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Cost of all attempts together, at the prices of their plans."""

    usd: float
    usd_per_hour: float
    """Rate of the attempt that wrote it, all nodes together."""


def read_spending(run_dir: RunDir) -> Spending | None:
    """Return the newest count; None: no price was known, or no step has run yet."""
    event = _latest_spent_event(run_dir)
    if event is None:
        return None
    return Spending(usd=event["usd"], usd_per_hour=event["usd_per_hour"])


def seconds_since_count(run_dir: RunDir, attempt: int, *, now_t: float) -> float:
    """Return the time that the newest count of an attempt leaves out; 0: it has no count.

    Args:
        now_t: Unix seconds.
    """
    event = _latest_spent_event(run_dir)
    if event is None or event.get("attempt") != attempt:
        return 0.0
    return max(0.0, now_t - float(event["t"]))


def _latest_spent_event(run_dir: RunDir) -> dict[str, Any] | None:
    for event in read_lines_backwards(run_dir.events, with_any=('"spent"',)):
        numbers = event.get("usd"), event.get("usd_per_hour"), event.get("t")
        if event.get("kind") == "spent" and None not in numbers:
            return event
    return None
