"""The state of many jobs at once, as far as their launchers answer in time."""

import queue
import threading
import time
from collections.abc import Sequence

from shardyard.control.job import job_of
from shardyard.control.submission import Launchers, launcher_named
from shardyard.errors import ShardyardError
from shardyard.launch.ledger import Entry
from shardyard.rundir.layout import RunDir

_THREADS = 8


def ask_all(
    jobs: Sequence[tuple[RunDir, Entry]], launchers: Launchers | None, *, within_s: float
) -> dict[str, str]:
    """Run id -> state of its job, in a word; a job that was not told of in time is left out."""
    waiting: queue.SimpleQueue[tuple[RunDir, Entry]] = queue.SimpleQueue()
    told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    ends_at = time.monotonic() + within_s

    def ask() -> None:
        while time.monotonic() < ends_at:
            try:
                run_dir, entry = waiting.get_nowait()
            except queue.Empty:
                return
            told.put((run_dir.run_id, _state(run_dir, entry, launchers)))

    # daemons, not a pool: one that hangs in a call must not keep the list from being shown
    for _ in range(min(_THREADS, len(jobs))):
        threading.Thread(target=ask, daemon=True).start()
    found: dict[str, str] = {}
    while len(found) < len(jobs) and (left_s := ends_at - time.monotonic()) > 0:
        try:
            run_id, state = told.get(timeout=left_s)
        except queue.Empty:
            break
        found[run_id] = state
    return found


def _state(run_dir: RunDir, entry: Entry, launchers: Launchers | None) -> str:
    try:
        job = job_of(run_dir, entry)
        return launcher_named(job.launcher, launchers).status(job).state.value
    except ShardyardError:  # `shardyard status` says what is the matter
        return "no answer"
