"""Is a hang told where there is none, and how soon is a rank that is stopped?

    python -m benchmarks.hang_alarms --steps 10000 --load 2 --stops 20 [--set model.compile=true]

One run at defaults with evaluations and saves, while so many processes a core compute beside it;
no event may say that a rank hangs. Then another, in which ranks chosen at random are stopped
(SIGSTOP) one after the other: each must be blamed. Writes one JSON file.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.real_run import end_by_signals, running, verb, write_corpus
from benchmarks.record import write_result
from shardyard.io.polling import wait_for
from shardyard.rundir.jsonl import LOSSES, read_lines, read_lines_backwards, read_steps
from shardyard.rundir.layout import RunDir

RECIPE = [
    "model.preset=llama-tiny",
    "data.source=text",
    "data.vocab_size=512",
    "data.eval_fraction=0.1",
    "optim.global_batch=8",
    "optim.micro_batch=4",
    "cluster.device=cpu",
    "cluster.devices=2",
    "parallel.strategy=FULL_SHARD",
]
_POLL_S = 0.02
_PATIENCE_S = 1800.0
"""For one step: on a busy machine an empty compile cache takes minutes to fill."""
LONGEST_PAUSE_S = 3.0
"""Between a restart and the next stop; at least a step is finished before."""


def main() -> int:
    """Run both parts in a folder of its own; exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--load", type=float, default=2.0, help="busy processes a core beside it")
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], help="settings of both runs")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    end_by_signals()
    folder = Path(tempfile.mkdtemp(prefix="hang-alarms-"))
    try:
        write_corpus(folder / "text")
        calm = false_alarms(folder, steps=args.steps, load=args.load, settings=args.set)
        stops = stopped_ranks(folder, stops=args.stops, seed=args.seed, settings=args.set)
    finally:
        shutil.rmtree(folder)
    passed = not calm["losses"] and calm["steps"] == args.steps
    passed = passed and all(stop["is_right"] and stop["is_soon"] for stop in stops)
    noticed_s = [stop["noticed_s"] for stop in stops]
    result = {
        "passed": passed,
        "calm": calm,
        "stops": stops,
        "noticed_s": {"median": statistics.median(noticed_s), "max": max(noticed_s)},
    }
    print(json.dumps(result, indent=1))
    write_result("hang-alarms", result, args.out)
    return 0 if passed else 1


def false_alarms(
    folder: Path, *, steps: int, load: float, settings: Sequence[str]
) -> dict[str, Any]:
    """Train while the machine is busy with other things; what was told to be lost or to hang."""
    run = RunDir(folder / "runs" / "calm")
    asked = [f"run.steps={steps}", "checkpoint.every=100", "task.eval_every_steps=50"]
    with _busy(round(load * (os.cpu_count() or 1))) as others:
        began_s = time.monotonic()
        command = verb("train", *RECIPE, *asked, *settings, "run.id=calm")
        with running(folder, command, environment=_cache(folder)) as process:
            loads = list(_loads_until_end(process))
    events = list(read_lines(run.events))
    return {
        "exit_code": process.returncode,
        "steps": max((line["step"] for line in read_steps(run.metrics)), default=0),
        "evaluations": sum(event["kind"] == "evaluated" for event in events),
        "saves": sum(event["kind"] == "checkpoint_durable" for event in events),
        "losses": [event for event in events if event["kind"] in LOSSES],
        "stragglers": [e for e in events if e["kind"] in ("straggler", "slow_link")],
        "busy_processes": others,
        "load_average": {"median": statistics.median(loads), "min": min(loads)},
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _loads_until_end(process: subprocess.Popen[bytes]) -> Iterator[float]:
    """The machine's load, a minute's mean each: with the run's own and all that others do."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60.0)
        yield round(os.getloadavg()[0], 2)
        if process.returncode is not None:
            return


def stopped_ranks(
    folder: Path, *, stops: int, seed: int, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """Stop a rank, again and again; for each how soon it was noticed and who was blamed."""
    run, chance = RunDir(folder / "runs" / "stopped"), random.Random(seed)
    asked = ["run.steps=1000000", "checkpoint.every=5", f"elastic.max_restarts={stops}"]
    command = verb("train", *RECIPE, *asked, *settings, "run.id=stopped")
    with running(folder, command, environment=_cache(folder)) as process:
        return [_stop_one(process, run, generation, chance) for generation in range(stops)]


def _cache(folder: Path) -> dict[str, str]:
    """Of the compiler, where the model is compiled: empty at first, and of these two runs alone."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}


def _stop_one(
    process: subprocess.Popen[bytes], run: RunDir, generation: int, chance: random.Random
) -> dict[str, Any]:
    _wait_for_step(process, run, generation)
    time.sleep(chance.uniform(0.0, LONGEST_PAUSE_S))
    (met,) = (e for e in _events(run, "rendezvous") if e["generation"] == generation)
    victim = chance.choice(met["workers"])
    usual_s = statistics.median(line["step_time_s"] for line in read_steps(run.metrics)[-20:])
    os.kill(victim["pid"], signal.SIGSTOP)
    stopped_s, stopped_t = time.monotonic(), time.time()
    _wait_for(process, lambda: _losses(run, generation))
    _wait_for_step(process, run, generation + 1)
    hung = _losses(run, generation)  # all that was told of it
    noticed_s, next_step_s = hung[0]["t"] - stopped_t, time.monotonic() - stopped_s
    return {
        "rank": victim["rank"],
        "usual_step_s": round(usual_s, 3),
        "noticed_s": round(noticed_s, 3),
        "next_step_s": round(next_step_s, 3),
        "is_soon": is_soon(noticed_s, next_step_s, usual_s),
        "told": hung,
        "is_right": [(e["kind"], e.get("rank")) for e in hung] == [("worker_hung", victim["rank"])],
    }


def is_soon(noticed_s: float, next_step_s: float, usual_s: float) -> bool:
    """The bar: within 5 s or ten usual steps, and the next step within 5 s more."""
    return noticed_s <= max(5.0, 10 * usual_s) and next_step_s - noticed_s <= 5.0


def _wait_for_step(process: subprocess.Popen[bytes], run: RunDir, generation: int) -> None:
    def has_stepped() -> bool:
        newest = next(read_lines_backwards(run.metrics), {})
        return newest.get("generation") == generation

    _wait_for(process, has_stepped)


def _wait_for(process: subprocess.Popen[bytes], look: Callable[[], Any]) -> None:
    """Until something is found.

    Raises:
        SystemExit: The run has ended, or it does not come for long.
    """

    def found() -> bool:
        return bool(look()) or process.poll() is not None

    is_found = wait_for(found, every_s=_POLL_S, within_s=_PATIENCE_S)
    if not is_found or process.returncode is not None:
        raise SystemExit(f"waited in vain; the run's exit code: {process.returncode}")


def _losses(run: RunDir, generation: int) -> list[dict[str, Any]]:
    return [event for event in _events(run, *LOSSES) if event["generation"] == generation]


def _events(run: RunDir, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["kind"] in kinds]


@contextmanager
def _busy(number: int) -> Iterator[int]:
    """So many processes that compute for nothing."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield number
    finally:
        for each in others:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main())
