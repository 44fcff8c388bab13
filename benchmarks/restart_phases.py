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
| load | `checkpoint_loaded.seconds`, `snapshot_restored.seconds` |
| first step | `model_ready`, `first_step` |

Before each kill the checkpoints' files are dropped from the page cache. So whoever reads one of
them afterwards, by whatever call, has storage read it: `read_bytes` counts what the new workers had
read up to their first step, `cached_bytes` what of the files is in memory again.

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

from benchmarks.page_cache import cached_bytes, drop, read_bytes
from benchmarks.real_run import end_by_signals, running, verb, write_corpus
from benchmarks.record import write_result
from shardyard.elastic.standby import READY_NAME
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir

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
STEPS_BETWEEN = 12
"""Steps from a restart to the next kill, at the least."""
_PATIENCE_S = 900.0
"""Without a word of the run: on a busy machine an empty compile cache takes minutes to fill."""
_FAILURES = 3
"""Starts of a variant that may come to nothing before the others go on without it."""


def main() -> int:
    """Measure, print the medians, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each variant")
    parser.add_argument("--kills-a-start", type=int, default=5)
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="for all variants")
    args = parser.parse_args()
    end_by_signals()
    found, failures = measure(args.variants, args.kills, args.kills_a_start, args.settings)
    summary = {name: summarize(rows) for name, rows in found.items() if rows}
    write_result(
        "restart-phases",
        {
            "settings": [*RECIPE, *args.settings],
            "medians_s": summary,
            "kills": found,
            "failures": failures,
        },
        args.out,
    )
    for name, row in summary.items():
        print(name, *(f"{phase} {seconds:.3f}" for phase, seconds in row.items()), sep="  ")
    return 1 if failures else 0


def measure(
    variants: Sequence[str], kills: int, kills_a_start: int, settings: Sequence[str] = ()
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """Seconds by phase of so many kills of each variant.

    Returns:
        By variant what was measured, and why starts ended early: what they had measured counts.
    """
    folder = Path(tempfile.mkdtemp(prefix="restart-phases-"))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    failures: dict[str, list[str]] = {}
    # shared by all starts, and by nobody else: filled after the first
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    starts = 0
    try:
        write_corpus(folder / "text")
        while due := [
            name
            for name in variants
            if len(found[name]) < kills and len(failures.get(name, ())) < _FAILURES
        ]:
            for name in due:
                run = RunDir(folder / "runs" / f"run-{(starts := starts + 1)}")
                wanted = [*RECIPE, *settings, *filter(None, name.split(","))]
                many = min(kills_a_start, kills - len(found[name]))
                try:
                    kill_in_one_run(folder, run, wanted, many, found[name])
                except RunError as error:
                    failures.setdefault(name, []).append(str(error))
                    print(f"{name}: {error}", file=sys.stderr)
                shutil.rmtree(run.path, ignore_errors=True)  # a state may be large
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        shutil.rmtree(folder)
    return found, failures


class RunError(Exception):
    """A run ended by itself, or said nothing for long."""


def kill_in_one_run(
    folder: Path, run: RunDir, settings: Sequence[str], kills: int, rows: list[dict[str, Any]]
) -> None:
    """Start a run, kill its workers in turn, and append what was measured to the rows.

    Args:
        rows: Of all kills of this kind; in which the ranks take turns, whatever run they are of.

    Raises:
        RunError: It ended before there were so many kills.
    """
    parks = "elastic.parked=true" in settings
    with running(folder, verb("train", *settings, f"run.id={run.run_id}")) as process:
        for _ in range(kills):
            rows.append(_kill(process, run, rank=(len(rows) + 1) % 2, parks=parks))


def _kill(
    process: subprocess.Popen[bytes], run: RunDir, *, rank: int, parks: bool
) -> dict[str, Any]:
    """Kill a worker of the newest generation, once it steps; where the time to a step after went.

    Args:
        rank: Of the worker: 0 writes the run's events, 1 does not.
        parks: Others wait to take over: not before they are ready.
    """
    for _ in _looks(process, run):
        generation = _newest_generation(run)
        steps = [line for line in read_lines(run.metrics) if line.get("generation") == generation]
        if len(steps) >= STEPS_BETWEEN and _is_durable(run, generation):
            break  # without a new checkpoint the agent would pause before the restart
    (met,) = _of(run, generation, "rendezvous")
    pids = {worker["rank"]: worker["pid"] for worker in met["workers"]}
    for _ in _looks(process, run):
        if not parks or len(_parked(pids[rank])) == len(pids):
            break
    parked = _parked(pids[rank])
    parked_bytes = [_own_bytes(pid) for pid in parked]
    drop(run.checkpoints)
    read_before = {pid: read_bytes(pid) for pid in parked}
    killed_t = time.time()
    os.kill(pids[rank], signal.SIGKILL)
    for _ in _looks(process, run):
        if first := _of(run, generation + 1, "first_step"):
            break
    (met,) = _of(run, generation + 1, "rendezvous")
    pids_after = [worker["pid"] for worker in met["workers"]]
    (lost,) = _of(run, generation, "worker_lost")
    if lost["rank"] != rank:
        raise RunError(f"rank {rank} was killed, and lost was {lost}")
    return {
        "rank": rank,
        **_phases(run, generation, killed_t, first[0]["t"]),
        "usual step": median(line["step_time_s"] for line in steps[1:] if "step_time_s" in line),
        "state_bytes": _state_bytes(run, generation + 1),
        "read_bytes": sum(read_bytes(pid) - read_before.get(pid, 0) for pid in pids_after),
        # not of `latest`, a line that the agent reads to know which checkpoint is the newest
        "cached_bytes": sum(cached_bytes(step) for step in run.checkpoints.glob("step-*")),
        "parked_bytes": max(parked_bytes, default=0),
    }


def _looks(process: subprocess.Popen[bytes], run: RunDir) -> Iterator[None]:
    """Yields until the run has ended, or has not said a word for long."""
    said, heard_s = -1, time.monotonic()
    while True:
        if process.poll() is not None:
            raise RunError(f"the run ended ({process.returncode}): {_last_words(run)}")
        size = sum(file.stat().st_size for file in (run.events, run.metrics) if file.exists())
        if size != said:
            said, heard_s = size, time.monotonic()
        if time.monotonic() - heard_s > _PATIENCE_S:
            raise RunError(f"the run said nothing for {_PATIENCE_S:g} s: {_last_words(run)}")
        yield
        time.sleep(0.05)


def _last_words(run: RunDir) -> str:
    return "; ".join(str(event) for event in list(read_lines(run.events))[-3:])


def _newest_generation(run: RunDir) -> int:
    met = [event for event in read_lines(run.events) if event["kind"] == "rendezvous"]
    return int(met[-1]["generation"]) if met else 0


def _is_durable(run: RunDir, generation: int) -> bool:
    """Whether a checkpoint of this generation is, and none is being written."""
    begun, ended = (
        len(_of(run, generation, f"checkpoint_{what}")) for what in ("started", "durable")
    )
    return 0 < begun == ended


def _of(run: RunDir, generation: int, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for event in read_lines(run.events)
        if event["kind"] == kind and event.get("generation") == generation
    ]


def _phases(run: RunDir, generation: int, killed_t: float, stepped_t: float) -> dict[str, float]:
    lost_t = _of(run, generation, "worker_lost")[0]["t"]
    met, ready = (_of(run, generation + 1, kind)[0] for kind in ("rendezvous", "model_ready"))
    kinds = ("checkpoint_loaded", "snapshot_restored")
    load_s = sum(e["seconds"] for kind in kinds for e in _of(run, generation + 1, kind))
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


def _state_bytes(run: RunDir, generation: int) -> int:
    """Of one process: weights and optimizer state."""
    (ready,) = _of(run, generation, "model_ready")
    held = ready["memory_by_rank"]
    return max(int(each["parameters_bytes"]) + int(each["optimizer_bytes"]) for each in held)


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


def total_s(row: dict[str, Any]) -> float:
    """From the kill to the next finished step."""
    return float(sum(row[phase] for phase in PHASES))


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of seconds; of bytes the most."""
    seconds = {name: round(median(row[name] for row in rows), 4) for name in PHASES}
    return {
        **seconds,
        "total": round(median(map(total_s, rows)), 4),
        "usual step": round(median(row["usual step"] for row in rows), 4),
        "parked_mib": round(max(row["parked_bytes"] for row in rows) / 2**20),
        "state_mib": round(max(row["state_bytes"] for row in rows) / 2**20),
        "read_bytes": max(row["read_bytes"] for row in rows),
        "cached_bytes": max(row["cached_bytes"] for row in rows),
        "kills": len(rows),
    }


if __name__ == "__main__":
    sys.exit(main())
