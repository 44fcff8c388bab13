"""Whether this checkout is slower than a commit: start, steps, saves, recovery and data, in pairs.

Each round runs the same commands with the sources of this checkout and of the commit, in turns, as
whole processes, with the installed packages of this Python. A ratio below 1 means that this
checkout is quicker. The interval holds all rounds' ratios, so the median of many rounds is outside
of it with a chance of 2^(1 - rounds). A measure is slower when its whole interval is above 1.05.

    python -m benchmarks.regressions COMMIT
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.real_run import end_by_signals, running, verb, write_corpus
from benchmarks.record import result_file, write_result
from shardyard.hardware.machine import probe
from shardyard.rundir.jsonl import read_lines, read_steps

ROOT = Path(__file__).parents[1]
LIMIT = 1.05
STEPS = 40
WARM_UP = 8
"""First steps, which are not counted."""

_TEXT = (
    "model.preset=llama-tiny", "data.source=text", "data.vocab_size=1024", "data.seq_len=128",
    "data.eval_fraction=0.001", "optim.global_batch=8", "optim.micro_batch=4", "cluster.device=cpu",
    "cluster.devices=2", "parallel.strategy=FULL_SHARD", "checkpoint.every=20",
    f"run.steps={STEPS}",
)  # fmt: skip
_IMAGES = (
    "task.name=image_classification", "model.preset=resnet18", "data.source=images",
    "data.images.size=64", "data.eval_fraction=0.1", "optim.global_batch=16", "optim.micro_batch=8",
    "optim.lr=0.1", "cluster.device=cpu", "cluster.devices=2", "checkpoint.every=1000",
    "run.steps=16",
)  # fmt: skip

Seconds = dict[str, float]
"""Measure -> seconds."""


@dataclass(frozen=True)
class Checkout:
    """Sources to measure, and the folder where their runs are."""

    source: Path
    """Folder with the package."""
    folder: Path

    def run(self, *words: str) -> float:
        """Seconds of a command of the product, which must succeed."""
        begun = time.perf_counter()
        with running(self.folder, verb(*words), environment=self.environment) as process:
            code = process.wait()
        if code:
            log = (self.folder / "log.txt").read_text()
            raise RuntimeError(f"{' '.join(words)} of {self.source} ended with {code}:\n{log}")
        return time.perf_counter() - begun

    @property
    def environment(self) -> Mapping[str, str]:
        """With modules compiled once: else each start compiles all of them anew."""
        return {"PYTHONPATH": str(self.source), "PYTHONDONTWRITEBYTECODE": ""}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the ratios; 1 if a measure is slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="what this checkout is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    end_by_signals()
    now, before = (_commit(name) for name in ("HEAD", asked.commit))
    with tempfile.TemporaryDirectory(prefix="regressions-") as scratch:
        checkouts = {
            "now": Checkout(ROOT / "src", Path(scratch) / "now"),
            "before": Checkout(_sources_of(before, Path(scratch)), Path(scratch) / "before"),
        }
        for checkout in checkouts.values():
            checkout.folder.mkdir()
            write_corpus(checkout.folder / "text")
            _write_images(checkout.folder / "images")
            measured(checkout, "warm-up")
        rounds = []
        for number in range(asked.rounds):
            order = [*checkouts] if number % 2 else [*reversed(checkouts)]
            rounds.append({name: measured(checkouts[name], f"round-{number}") for name in order})
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr, flush=True)
    rows = compared(rounds)
    for name, row in rows.items():
        low, high = row["interval"]
        verdict = "  slower" if row["is_slower"] else ""
        print(f"{name:26} {row['ratio']:.3f}  {low:.3f} to {high:.3f}{verdict}")
    out = asked.out or result_file(f"regressions-{now[:8]}", probe())
    write_result("regressions", {"commit": now, "before": before, "measures": rows}, out)
    return int(any(row["is_slower"] for row in rows.values()))


def compared(rounds: Sequence[Mapping[str, Seconds]]) -> dict[str, dict[str, Any]]:
    """Ratios of now to before, of each measure."""
    rows = {}
    for name in rounds[0]["now"]:
        pairs = [(each["now"][name], each["before"][name]) for each in rounds]
        ratios = sorted(now / before for now, before in pairs)
        rows[name] = {
            "ratio": round(median(ratios), 4),
            "interval": [round(ratios[0], 4), round(ratios[-1], 4)],
            "is_slower": ratios[0] > LIMIT,
            "now_s": [now for now, _ in pairs],
            "before_s": [before for _, before in pairs],
        }
    return rows


def measured(checkout: Checkout, name: str) -> Seconds:
    """Seconds of each measure, of one round."""
    seconds = {
        "plan": checkout.run(
            "plan", "model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "run.steps=1000"
        ),
        # Of its own folder: the data is there else.
        "prepare text": checkout.run("prepare", *_TEXT, f"data.dir=prepared-{name}"),
    }
    seconds |= _text_run(checkout, f"text-{name}")
    seconds["export"] = checkout.run("export", f"text-{name}", "--to", f"exported-{name}")
    exact = f"exact-{name}"
    checkout.run("train", *_TEXT, "precision.reduce=exact", f"run.id={exact}")
    seconds["step with exact sums"] = _step_s(checkout, exact)
    images = f"images-{name}"
    checkout.run("train", *_IMAGES, f"run.id={images}")
    seconds["step on images"] = _step_s(checkout, images)
    seconds["killed worker to next step"] = _recovery_s(checkout, f"killed-{name}")
    return seconds


def _text_run(checkout: Checkout, run_id: str) -> Seconds:
    wall_begun = time.time()
    checkout.run("train", *_TEXT, f"run.id={run_id}")
    events = list(read_lines(checkout.folder / "runs" / run_id / "events.jsonl"))
    saved = [event for event in events if event["kind"] == "checkpoint_durable"]
    return {
        "start to first step": _event(events, "first_step")["t"] - wall_begun,
        "step": _step_s(checkout, run_id),
        "save": sum(event["seconds"] for event in saved),
    }


def _step_s(checkout: Checkout, run_id: str) -> float:
    steps = list(read_steps(checkout.folder / "runs" / run_id / "metrics.jsonl"))
    return float(median(line["step_time_s"] for line in steps[WARM_UP:]))


def _recovery_s(checkout: Checkout, run_id: str) -> float:
    """Seconds from the SIGKILL of a worker, behind a checkpoint, to the end of the next step."""
    folder = checkout.folder / "runs" / run_id
    command = verb("train", *_TEXT, "run.steps=400", f"run.id={run_id}")
    with running(checkout.folder, command, environment=checkout.environment):
        _wait_for(lambda: _kinds(folder) >= {"attempt_started", "checkpoint_durable"})
        started = _event(read_lines(folder / "events.jsonl"), "attempt_started")
        os.kill(started["workers"][1]["pid"], 9)
        begun = time.perf_counter()
        _wait_for(lambda: any(line["generation"] for line in read_steps(folder / "metrics.jsonl")))
        return time.perf_counter() - begun


def _wait_for(is_so: Callable[[], bool], within_s: float = 180) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not in {within_s:g} s")
        time.sleep(0.005)


def _write_images(folder: Path, number: int = 120) -> None:
    """Write pictures of noise in two classes."""
    draw = np.random.default_rng(0)
    for index in range(number):
        path = folder / f"class{index % 2}" / f"{index:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (80, 80, 3), dtype=np.uint8)).save(path)


def _kinds(run: Path) -> set[str]:
    return {event["kind"] for event in read_lines(run / "events.jsonl")}


def _event(events: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return next(event for event in events if event["kind"] == kind)


def _sources_of(commit: str, scratch: Path) -> Path:
    """The package of a commit, unpacked."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(scratch / "sources", filter="data")
    return scratch / "sources" / "src"


def _commit(name: str) -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
