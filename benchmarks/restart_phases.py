"""Where the seconds go from the kill of one worker to the next finished step, by phase.

    python -m benchmarks.restart_phases [--kills 20] [--variants VARIANT ...] [-- SETTING ...]

A real run (command line, agent, two CPU processes, llama-tiny), whose worker of rank 1 or rank 0 is
killed with SIGKILL once it steps. A variant is a list of settings, joined by commas; those of
one call take turns, a few kills each, so that a busy machine treats them alike. Each start's first
step is not counted. Phases are told by the run's own events:

| phase | from, to |
|---|---|
| notice | the kill, `worker_lost` |
| end | the other workers are ended, to the beginning of the rendezvous |
| rendezvous | its own seconds |
| start | its end, to the set-up: a process each, imports, process groups, mesh |
| set-up | data, model, optimizer: `model_ready.seconds` without the load |
| load | `checkpoint_loaded.seconds` |
| first step | `model_ready`, `first_step` |

Writes one JSON file.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.real_run import kill_tree, start, write_corpus
from benchmarks.record import write_result
from shardyard.elastic.parked import READY_NAME
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_lines

PHASES = ("notice", "end", "rendezvous", "start", "set-up", "load", "first step")
RECIPE = (
    "model.preset=llama-tiny",
    "data.source=text",
    "data.vocab_size=512",
    "data.seq_len=64",
    "optim.global_batch=8",
    "optim.micro_batch=4",
    "run.steps=1000000",
    "checkpoint.every=10",
    "parallel.strategy=FULL_SHARD",
    "cluster.device=cpu",
    "cluster.devices=2",
    "elastic.max_restarts=1000",
)
VARIANTS = (
    "elastic.parked=false",
    "elastic.parked=true",
    "model.compile=true,elastic.parked=false",
    "model.compile=true,elastic.parked=true",
)
_STEPS_BETWEEN = 12
"""Steps from a restart to the next kill, at the least."""
_PATIENCE_S = 300.0


def main() -> int:
    """Measure, print the medians, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each variant")
    parser.add_argument("--kills-a-start", type=int, default=5)
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="for all variants")
    args = parser.parse_args()
    found = measure(args.variants, args.kills, args.kills_a_start, args.settings)
    summary = {name: _summary(rows) for name, rows in found.items()}
    write_result(
        "restart-phases",
        {"settings": [*RECIPE, *args.settings], "medians_s": summary, "kills": found},
        args.out,
    )
    for name, row in summary.items():
        print(name, *(f"{phase} {seconds:.3f}" for phase, seconds in row.items()), sep="  ")
    return 0


def measure(
    variants: Sequence[str], kills: int, kills_a_start: int, settings: Sequence[str] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Seconds by phase of so many kills of each variant."""
    folder = Path(tempfile.mkdtemp(prefix="restart-phases-"))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    try:
        write_corpus(folder / "text")
        while due := [name for name in variants if len(found[name]) < kills]:
            for name in due:
                number = len(found[name])
                run = RunDir(folder / "runs" / f"run-{number}-{variants.index(name)}")
                wanted = [*RECIPE, *settings, *filter(None, name.split(","))]
                many = min(kills_a_start, kills - len(found[name]))
                found[name] += _one_run(folder, run, wanted, many)
    finally:
        shutil.rmtree(folder)
    return found


def _one_run(
    folder: Path, run: RunDir, settings: Sequence[str], kills: int
) -> list[dict[str, Any]]:
    process = start(folder, ["train", *settings, f"run.id={run.run_id}"])
    try:
        parks = "elastic.parked=true" in settings
        return [_kill(process, run, generation, parks=parks) for generation in range(kills)]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        finally:
            kill_tree(process)


def _kill(
    process: subprocess.Popen[bytes], run: RunDir, generation: int, *, parks: bool
) -> dict[str, Any]:
    """Kill a worker of a generation that steps; where the time to the next one's step went.

    Args:
        parks: Others wait to take over: not before they are ready.
    """
    for _ in _looks(process):
        steps = [line for line in read_lines(run.metrics) if line.get("generation") == generation]
        if len(steps) >= _STEPS_BETWEEN and _of(run, generation, "checkpoint_durable"):
            break  # without a new checkpoint the agent would pause before the restart
    rank = (generation + 1) % 2  # 1, 0, 1: who writes the run's events, and who does not
    (met,) = _of(run, generation, "rendezvous")
    pids = {worker["rank"]: worker["pid"] for worker in met["workers"]}
    for _ in _looks(process):
        if not parks or len(_parked(pids[rank])) == len(pids):
            break
    parked_bytes = [_own_bytes(pid) for pid in _parked(pids[rank])]
    killed_t = time.time()
    os.kill(pids[rank], signal.SIGKILL)
    for _ in _looks(process):
        if first := _of(run, generation + 1, "first_step"):
            phases = _phases(run, generation, killed_t, first[0]["t"])
            return {"rank": rank, **phases, "parked_bytes": max(parked_bytes, default=0)}
    raise AssertionError


def _looks(process: subprocess.Popen[bytes]) -> Iterator[None]:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        yield
        time.sleep(0.05)
    raise SystemExit(f"the run ended ({process.returncode}) or did nothing for {_PATIENCE_S:g} s")


def _of(run: RunDir, generation: int, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for event in read_lines(run.events)
        if event["kind"] == kind and event.get("generation") == generation
    ]


def _phases(run: RunDir, generation: int, killed_t: float, stepped_t: float) -> dict[str, float]:
    lost_t = _of(run, generation, "worker_lost")[0]["t"]
    met, ready = (_of(run, generation + 1, kind)[0] for kind in ("rendezvous", "model_ready"))
    loaded = _of(run, generation + 1, "checkpoint_loaded")
    load_s = loaded[0]["seconds"] if loaded else 0.0
    start_s = ready["t"] - ready["seconds"] - met["t"]
    seconds = {
        "notice": lost_t - killed_t,
        "end": met["t"] - met["seconds"] - lost_t,
        "rendezvous": met["seconds"],
        "start": start_s,
        "set-up": ready["seconds"] - load_s,
        "load": load_s,
        "first step": stepped_t - ready["t"],
    }
    return {name: round(value, 4) for name, value in seconds.items()}


def _parked(worker: int) -> list[int]:
    """Processes that are ready to take over, beside a worker."""
    parent = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
    siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in siblings if _name(pid) == READY_NAME]


def _name(pid: str) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _own_bytes(pid: int) -> int:
    """Resident memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    phases = {name: round(median(row[name] for row in rows), 4) for name in PHASES}
    total = median(sum(row[name] for name in PHASES) for row in rows)
    most_bytes = max(row["parked_bytes"] for row in rows)
    return {**phases, "total": round(total, 4), "parked_mib": round(most_bytes / 2**20)}


if __name__ == "__main__":
    sys.exit(main())
