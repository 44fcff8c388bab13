"""Two more faults for `shardyard drill`: kills during a restart's load and a snapshot's copy.

    OMP_NUM_THREADS=1 python -m benchmarks.timed_kills RECIPE [OPTION of shardyard drill ...]

| fault | what happens |
|---|---|
| `kill-in-load` | a rank is killed twice, then at a random moment of the second restart's load |
| `kill-in-snapshot` | a rank is killed at a random moment of a copy into a snapshot |

They test Shardyard's own protocols. inotify(7) reports when a checkpoint's files are opened. Those
of a small model are open for less than a millisecond, so probes of `/proc/PID/fd` came too late for
half of them. A snapshot is in the agent's memory (`elastic/heartbeat.py`) and begins with a mark,
which a copy removes first and writes last (`checkpoint/snapshots/slot.py`).
"""

import ctypes
import errno
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from shardyard.cli import main as run_shardyard
from shardyard.config.formulas import slot_labels, snapshots_enabled
from shardyard.control.request import Request
from shardyard.drill.case_state import CaseState, MissedInjection
from shardyard.drill.faults import FAULTS, ExpectedReport, Fault
from shardyard.drill.recipe import DrillRecipe
from shardyard.drill.scene import parent_of
from shardyard.io.polling import wait_for

_OPENED = 0x20
"""IN_OPEN of linux/inotify.h."""
_MOST_BYTES = 1 << 16
"""Most bytes of inotify events read at once; an event takes 16 and its file's name."""
_MARK_BYTES = 8
_LOOK_S = 0.1
"""At most, for a load that begins."""
_POLL_S = 0.005


def main() -> int:
    """Drill as `shardyard drill` does, with these faults too."""
    FAULTS.update(TIMED_KILLS)
    return run_shardyard(["drill", *sys.argv[1:]])


class FileOpenWatcher:
    """Openings of tensor files in folders; each folder is watched until `close`.

    Missing folders are skipped, because a run removes its old checkpoints.
    """

    def __init__(self, folders: list[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._words: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._words < 0:
            raise _inotify_error()
        for folder in folders:
            watched = libc.inotify_add_watch(self._words, os.fsencode(folder), _OPENED)
            if watched < 0 and ctypes.get_errno() != errno.ENOENT:
                self.close()
                raise _inotify_error(folder)

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._words)

    def wait_for_open(self, within_s: float) -> bool:
        """Whether a tensor file was opened since the last call, or is within these seconds."""
        if not select.select([self._words], [], [], within_s)[0]:
            return False
        return b".safetensors\0" in os.read(self._words, _MOST_BYTES)


def _inotify_error(folder: Path | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), None if folder is None else str(folder))


class SlotWatch:
    """The slots of one rank."""

    def __init__(self, agent: int, local_rank: int) -> None:
        wanted = {f"/memfd:shardyard-{label} (deleted)" for label in slot_labels(local_rank)}
        self._files: list[int] = []
        for link in Path(f"/proc/{agent}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()) in wanted:
                    self._files.append(os.open(link, os.O_RDONLY))
        self._was_filled = [False] * len(self._files)

    def is_copying(self) -> bool:
        """Whether a slot that held a snapshot holds none now."""
        marks = [any(os.pread(file, _MARK_BYTES, 0)) for file in self._files]
        is_copying = any(had and not has for had, has in zip(self._was_filled, marks, strict=True))
        self._was_filled = [had or has for had, has in zip(self._was_filled, marks, strict=True)]
        return is_copying

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def _kill_in_load(state: CaseState) -> None:
    """Kill a rank twice: the first restart shows how long a load takes, in the second one the rank
    is killed at a random moment of it."""
    state.kill(state.worker)
    generation = _wait_for_load(state)
    began_s = time.monotonic()
    state.wait(lambda: _has_loaded(state, generation), "the end of a load")
    took_s = time.monotonic() - began_s
    step = state.last_step()
    state.wait(lambda: state.last_step() > step, "a step after the restart")
    state.kill(state.worker)
    generation = _wait_for_load(state)
    worker = state.worker
    time.sleep(state.draw.uniform(0.0, took_s))
    state.kill(worker)
    _wait_until_gone(state, worker, "the killed rank")
    state.notes |= {"was_inside": not _has_loaded(state, generation), "load_s": round(took_s, 4)}


def _wait_for_load(state: CaseState) -> int:
    """Until the restart that comes now opens a checkpoint's tensors: its generation."""
    before = len(state.events("rendezvous"))
    state.wait(lambda: len(state.events("rendezvous")) > before, "the restart")
    generation = int(state.events("rendezvous")[-1]["generation"])
    saved = [state.run.checkpoint(step) for step in state.run.checkpoint_steps()]
    with closing(FileOpenWatcher(saved)) as openings:
        _wait_closely(
            state,
            lambda: openings.wait_for_open(_LOOK_S) or _has_loaded(state, generation),
            "the beginning of a load",
        )
    return generation


def _has_loaded(state: CaseState, generation: int) -> bool:
    return any(e["generation"] == generation for e in state.events("checkpoint_loaded"))


def _kill_in_snapshot(state: CaseState) -> None:
    """Kill a rank at a random moment of a copy, once it is known how long one takes."""
    worker = state.worker
    with closing(SlotWatch(state.agent, _local_rank(state))) as slots:
        _wait_closely(state, slots.is_copying, "a snapshot")
        began_s = time.monotonic()
        _wait_closely(state, lambda: not slots.is_copying(), "the end of a snapshot")
        took_s = time.monotonic() - began_s
        _wait_closely(state, slots.is_copying, "another snapshot")
        end_s = time.monotonic() + state.draw.uniform(0.0, took_s)
        while time.monotonic() < end_s:
            pass
        state.kill(worker)
        _wait_until_gone(state, worker, "the killed rank")
        state.notes["was_inside"] = slots.is_copying()


def _local_rank(state: CaseState) -> int:
    """The target's number among the ranks of its node."""
    before = [pid for rank, pid in state.workers().items() if rank < state.rank]
    return sum(parent_of(pid) == state.fork_server for pid in before)


def _wait_closely(state: CaseState, condition: Callable[[], bool], what: str) -> None:
    """Wait for a moment of less than a millisecond, with all of a processor.

    Raises:
        Missed: It did not come in time.
    """
    deadline_s = time.monotonic() + state.within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise MissedInjection(f"{what} did not come")


def _wait_until_gone(state: CaseState, pid: int, what: str) -> None:
    """Wait for the end of a process of this case; the others may end with it."""
    wait_for(lambda: not state.marked.has(pid), every_s=_POLL_S, within_s=state.within_s)
    if state.marked.has(pid):
        raise MissedInjection(f"{what} did not end")


@dataclass(frozen=True, kw_only=True)
class _WithSnapshots(Fault):
    """A fault of a recipe that takes snapshots."""

    def impossible_reason(self, drilled: DrillRecipe) -> str:
        """Why it is not possible with this recipe, on this machine; empty: it is."""
        if not snapshots_enabled(Request.read(drilled.words, runs_here=True).recipe):
            return "the recipe takes none; elastic.snapshot_every=2 takes one every two steps"
        return super().impossible_reason(drilled)


_KILLED = ExpectedReport(kinds=("worker_lost",), words="SIGKILL", who="rank")
TIMED_KILLS: dict[str, Fault] = {
    "kill-in-load": Fault(
        what="a rank is killed, and again while a restart loads",
        method="SIGKILL twice, and another at a random moment of the second restart's load",
        acts_on="rank",
        named=_KILLED,
        strike=_kill_in_load,
    ),
    "kill-in-snapshot": _WithSnapshots(
        what="a rank is killed while its state is copied into a snapshot",
        method="SIGKILL at a random moment of a copy",
        acts_on="rank",
        named=_KILLED,
        strike=_kill_in_snapshot,
    ),
}
"""Name -> fault, as in the table of `drill/faults.py`."""


if __name__ == "__main__":
    sys.exit(main())
