"""Plain torchrun with ours' model, interval of checkpoints and monitor interval, and who kills it.

`torchrun_script.py` is what it starts. A worker is killed by SIGKILL; then torchrun finds it, ends
the others, meets anew and starts all of them again, with their imports. After two minutes without a
finished step it hangs, and is ended and started again, as a person would who watches.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.real_run import new_mark, running
from benchmarks.restart_phases import STEPS_BETWEEN, RunError
from shardyard.drill.scene import TaggedProcesses
from shardyard.families.presets import PRESETS
from shardyard.io.polling import wait_for

RANKS = 2
HUNG_S = 120.0
_MONITOR_S = 0.1
"""As our agent looks, and torchrun by default."""
_START_S = 600.0
"""Of a first start, on a busy machine."""
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """One torchrun under way, and what its script has noted."""

    folder: Path
    process: subprocess.Popen[bytes]
    marked: TaggedProcesses

    def steps(self) -> list[dict[str, Any]]:
        """Each finished step, repeated ones too."""
        return _noted(self.folder / "steps.jsonl")

    def workers(self) -> dict[int, int]:
        """Rank -> process, of the newest start."""
        return {line["rank"]: line["pid"] for line in _noted(self.folder / "workers.jsonl")}

    def kill(self, pid: int) -> bool:
        """Kill a worker; False: it had ended."""
        return self.marked.signal(pid, signal.SIGKILL)

    @property
    def saved_step(self) -> int:
        newest = self.folder / "newest"
        return int(newest.read_text()) if newest.exists() else 0

    def wait(self, look: Callable[[], Any], *, within_s: float) -> str:
        """Wait for something: ``stepped`` once it is so, else ``ended`` or ``hung``."""

        def found() -> str | None:
            if look():
                return "stepped"
            return None if self.process.poll() is None else "ended"

        return wait_for(found, every_s=_POLL_S, within_s=within_s) or "hung"


def prepare(folder: Path, *, seq_len: int, micro_batch: int, every: int, vocab_size: int) -> None:
    """Write what the script reads: its model, which is llama-tiny, and some text.

    Args:
        folder: Has ours' text in ``text``.
        every: Steps between checkpoints.
        micro_batch: Of each rank; it takes one a step.
    """
    shape = replace(PRESETS["llama-tiny"].shape, vocab_size=vocab_size)
    model = {"model_type": shape.model_type, **shape.family.config_json.written(shape)}
    asked = {"model": model, "seq_len": seq_len, "micro_batch": micro_batch, "every": every}
    place = folder / "torchrun"
    place.mkdir()
    (place / "asked.json").write_text(json.dumps(asked))
    files = sorted((folder / "text").iterdir())
    (place / "text.bin").write_bytes(b"".join(file.read_bytes() for file in files))


@contextmanager
def started(folder: Path) -> Iterator[Torchrun]:
    """Start torchrun where ``prepare`` was, from its newest checkpoint; it ends with the block."""
    place = folder / "torchrun"
    root = str(Path(__file__).parents[1])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(RANKS), "--max-restarts", "1000000", "--monitor-interval", str(_MONITOR_S),
        "--module", "benchmarks.torchrun_script", str(place),
    ]  # fmt: skip
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    marked = new_mark()
    with running(place, command, environment=environment, marked=marked) as process:
        yield Torchrun(folder=place, process=process, marked=marked)


def kill_in_one_start(folder: Path, kills: int, rows: list[dict[str, Any]]) -> None:
    """Start it, kill its workers in turn until so many kills or a hang, and append what was seen.

    Raises:
        RunError: It never stepped, or steps and never saves.
    """
    with started(folder) as torchrun:
        for _ in range(kills):
            steps, saved = len(torchrun.steps()) + STEPS_BETWEEN, torchrun.saved_step
            how = torchrun.wait(partial(_is_warm, torchrun, steps, saved), within_s=_START_S)
            if how != "stepped":
                raise RunError(f"torchrun {how} by itself: {_last_words(torchrun.folder)}")
            rows.append(kill_one(torchrun, rank=(len(rows) + 1) % RANKS))
            if rows[-1]["outcome"] != "stepped":
                return


def _is_warm(torchrun: Torchrun, steps: int, saved: int) -> bool:
    """As ours is before a kill: a dozen steps, and a checkpoint of its own."""
    return len(torchrun.steps()) >= steps and torchrun.saved_step > saved


def kill_one(torchrun: Torchrun, *, rank: int) -> dict[str, Any]:
    """Kill a worker; seconds to the next step that those who come after it finish."""
    pids = torchrun.workers()
    killed_t, killed_s = time.time(), time.monotonic()
    torchrun.kill(pids[rank])

    def after() -> list[dict[str, Any]]:
        return [line for line in torchrun.steps() if line["pid"] != pids[0]]

    before = len(after())
    outcome = torchrun.wait(lambda: len(after()) > before, within_s=HUNG_S)
    stepped = after()[before:]
    return {
        "rank": rank,
        "outcome": outcome,
        "seconds": round(stepped[0]["t"] - killed_t, 4) if stepped else None,
        "waited_s": round(time.monotonic() - killed_s, 4),
    }


def _noted(file: Path) -> list[dict[str, Any]]:
    """What the script has noted; a line that a kill tore, or that is under way, is passed over."""
    found: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _last_words(folder: Path) -> str:
    return (folder / "log.txt").read_text(errors="replace")[-2000:]
