"""What state a run is in, read from its folder alone.

======== =========================================================================
state    meaning
======== =========================================================================
new      nothing was started yet
running  a process holds the lease
draining it was asked to stop and is making its last step durable
finished all steps are done
drained  stopped by SIGTERM or Ctrl-C with its last step durable; can be resumed without loss
failed   the last attempt ended with an error, or was stopped before its last step was durable
lost     the last attempt ended without a word (killed, machine gone); can be resumed
======== =========================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_held
from shardyard.rundir.lines import read_lines, read_steps


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One row of `shardyard runs`."""

    id: str
    state: str
    step: int | None
    """Last step with a line in metrics.jsonl."""
    loss: float | None
    updated_at: float | None
    """Unix seconds of the last change in events.jsonl or metrics.jsonl."""


def read_state(run_dir: RunDir) -> RunState:
    """State of one run, from its events, metrics and lease."""
    steps = read_steps(run_dir.metrics)
    files = [path for path in (run_dir.events, run_dir.metrics) if path.is_file()]
    return RunState(
        id=run_dir.run_id,
        state=state_of(list(read_lines(run_dir.events)), is_leased=is_held(run_dir.lease)),
        step=steps[-1]["step"] if steps else None,
        loss=steps[-1]["loss"] if steps else None,
        updated_at=max((path.stat().st_mtime for path in files), default=None),
    )


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
