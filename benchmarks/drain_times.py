"""Seconds from SIGTERM to a durable last step, and to the end of all processes, under load.

    python -m benchmarks.drain_times [--tries 20] [--load 2] [-- SETTING ...]

Each try is a run of llama-tiny on two CPU processes, as `shardyard train` starts it, beside so many
busy processes for each core; its command line is sent SIGTERM at a random moment between two
steps of its life. Phases are told by the run's own events:

| phase | from, to |
|---|---|
| notice | the signal, `draining` |
| finish | the step that runs, and agreeing on it: `draining`, `checkpoint_started` |
| save | `checkpoint_started`, `checkpoint_durable` |
| end | `checkpoint_durable`, `attempt_ended`: the workers' end |
| leave | `attempt_ended`, nothing of the run is left: the report, the command line's own end |

The bar: 5 s in all. Tries with a short `elastic.drain_timeout_s` follow (`--timeouts`): whether the
step was saved in time, and how long after the time was over all had ended. Writes one JSON file.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.real_run import write_corpus
from benchmarks.record import write_result
from shardyard.drill.scene import TaggedProcesses
from shardyard.io.polling import wait_for
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir

PHASES = ("notice", "finish", "save", "end", "leave")
BAR_S = 5.0
TIMEOUTS_S = (0.2, 0.5, 1.0, 2.0)
SETTINGS = (
    "model.preset=llama-tiny",
    "data.vocab_size=512",
    "data.seq_len=64",
    "optim.global_batch=8",
    "optim.micro_batch=4",
    "run.steps=1000000",
    "checkpoint.every=1000",
    "parallel.strategy=FULL_SHARD",
    "cluster.device=cpu",
    "cluster.devices=2",
)
_PATIENCE_S = 1200.0


def main() -> int:
    """Measure, print, write the result file; returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--load", type=int, default=2, help="busy processes for each core")
    parser.add_argument("--timeouts", type=float, nargs="*", default=TIMEOUTS_S)
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="of the recipe, in place of its own")
    args = parser.parse_args()
    with _load(args.load * len(os.sched_getaffinity(0))):
        found = measure([None] * args.tries, args.settings)
        short = measure(args.timeouts, args.settings)
    phases = {name: round(median(row["seconds"][name] for row in found), 4) for name in PHASES}
    longest = max(row["total_s"] for row in found)
    print(f"all gone after {median(row['total_s'] for row in found):.2f} s, at most {longest:.2f}")
    print(*(f"{name} {seconds:.3f}" for name, seconds in phases.items()), sep="  ")
    for row in short:
        over_s = row["total_s"] - row["timeout_s"]
        print(f"in {row['timeout_s']} s: saved {row['is_saved']}, all gone {over_s:+.2f} s after")
    is_met = longest <= BAR_S and all(row["is_saved"] for row in found)
    content = {"settings": [*SETTINGS, *args.settings], "busy_per_core": args.load}
    content |= {"bar_s": BAR_S, "is_met": is_met, "longest_s": longest, "medians_s": phases}
    write_result("drain-times", {**content, "tries": found, "short": short}, args.out)
    return 0 if is_met else 1


def measure(
    timeouts_s: Sequence[float | None], settings: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One try for each time that a drain may take; None: as the recipe has it."""
    folder = Path(tempfile.mkdtemp(prefix="drain-times-"))
    draw = random.Random(0)
    try:
        write_corpus(folder / "text")
        own = (f"data.source={folder}/text", f"data.dir={folder}/prepared", f"run.dir={folder}")
        found = []
        for number, timeout_s in enumerate(timeouts_s):
            limit = () if timeout_s is None else (f"elastic.drain_timeout_s={timeout_s}",)
            run = RunDir(folder / f"run-{number}")
            words = [*SETTINGS, *own, *settings, *limit, f"run.id={run.run_id}"]
            found.append(_try(run, words, draw, timeout_s))
        return found
    finally:
        shutil.rmtree(folder)


def _try(
    run: RunDir, words: Sequence[str], draw: random.Random, timeout_s: float | None
) -> dict[str, Any]:
    """Start a run, ask it to stop once it steps, and wait until nothing of it is left."""
    marked = TaggedProcesses()
    log = run.path.with_suffix(".txt")
    with log.open("wb") as talk:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardyard", "train", *words],
            stdin=subprocess.DEVNULL, stdout=talk, stderr=talk,
            env={**os.environ, **marked.environment},
        )  # fmt: skip
    try:
        _wait(lambda: sum(1 for _ in read_lines(run.metrics)) >= 10, process, log)
        time.sleep(draw.uniform(0.0, 0.5))
        asked_t = time.time()
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE_S)
        left = marked.wait_for_end(_PATIENCE_S)
        gone_t = time.time()
        if left:
            raise SystemExit(f"{len(left)} processes are left")
    finally:
        marked.kill_all()
        process.wait()
    t = {event["kind"]: event["t"] for event in read_lines(run.events)}
    row: dict[str, Any] = {
        "timeout_s": timeout_s,
        "exit_code": process.returncode,
        "is_saved": "checkpoint_durable" in t,
        "total_s": round(gone_t - asked_t, 4),
    }
    if not row["is_saved"]:
        return row
    ends = [t["draining"], t["checkpoint_started"], t["checkpoint_durable"], t["attempt_ended"]]
    moments = [asked_t, *ends, gone_t]
    seconds = (after - before for before, after in pairwise(moments))
    return {**row, "seconds": {k: round(v, 4) for k, v in zip(PHASES, seconds, strict=True)}}


def _wait(look: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    wait_for(lambda: look() or process.poll() is not None, every_s=0.02, within_s=_PATIENCE_S)
    if process.poll() is not None or not look():
        process.kill()
        raise SystemExit(f"the run did not begin to step:\n{log.read_text()[-2000:]}")


@contextmanager
def _load(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
