"""Memory of a process over 1,000 steps of each task, with evaluations and checkpoints between them.

Each task trains a tiny model in one process of its own. As a step begins the process reads what it
holds itself (``RssAnon`` and ``RssShmem``): not the pages of mapped files, which the kernel drops
when it needs room. Bar: after a fifth of the steps it grows no more, by 2 % or 5 MB at most.

    python -m benchmarks.flat_memory [--steps 1000] [--only chat] [--out FILE]
"""

import argparse
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from shardyard.control.attempt import write_down
from shardyard.control.request import Request
from shardyard.control.train import begin, first_attempt
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks

SAMPLES = 10
"""A run is looked at so often, evaluated and saved as often."""
SHARE, BYTES = 0.02, 5_000_000
DIALOGUES = Path(__file__).parent.parent / "examples" / "dialogues.jsonl"

BERT = {"model": {"preset": "bert-tiny"}}
TASKS: dict[str, dict[str, dict[str, Any]]] = {
    "causal_lm, stream": {},
    "causal_lm, whole": {"data": {"pack": "whole", "too_long": "cut"}},
    "chat": {"data": {"format": "chat", "chat_template": "chatml", "source": str(DIALOGUES)}},
    "masked_lm": {**BERT, "task": {"name": "masked_lm"}},
    "bert_pretraining": {
        **BERT,
        "task": {"name": "bert_pretraining"},
        "data": {"format": "sentences", "tokenizer_kind": "wordpiece", "min_true_pairs": 0},
    },
    "mixture": {},
    "LoRA": {"model": {"preset": "llama-tiny", "lora": {"rank": 4}}},
    "images": {"model": {"preset": "resnet-tiny"}},
}
"""What a recipe says beside what all say."""


def recipe_of(task: str, place: Path, *, steps: int) -> dict[str, dict[str, Any]]:
    """The sections of a run on modules of the interpreter, all below a folder."""
    modules = Path(sysconfig.get_path("stdlib"))
    text: dict[str, Any] = {"source": str(modules / "email" / "*.py")}
    if task == "mixture":
        text = {
            "mixture": [
                {"name": "mail", "source": text["source"], "weight": 2.0},
                {"name": "json", "source": str(modules / "json" / "*.py"), "weight": 1.0},
            ]
        }
    of_text = {
        "format": "text", "tokenizer": "train", "vocab_size": 512, "seq_len": 64,
        "eval_fraction": 0.1,
    }  # fmt: skip
    of_task: dict[str, Any] = {"generate_tokens": 0}
    if task == "images":
        text, of_text = {"source": "digits"}, {}
        of_task = {"name": "image_classification"}
    every = max(1, steps // SAMPLES)
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "dir": str(place / "runs"), "id": "run"},
        "model": {"preset": "llama-tiny"},
        "task": {"eval_every_steps": every, **of_task},
        "data": {
            **text, **of_text, "workers": 1, "dir": str(place / "data"),
        },
        "optim": {"lr": 1e-3, "global_batch": 4, "micro_batch": 2},
        "checkpoint": {"every": every, "keep_last": 2},
        "cluster": {"device": "cpu", "devices": 1},
    }  # fmt: skip
    return {name: {**each, **TASKS[task].get(name, {})} for name, each in base.items()}


def held_bytes() -> int:
    """What this process holds in memory of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * sum(int(found[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def _train(run_dir: RunDir, every: int) -> list[int]:
    """Train, and read memory as every so many-th step is done."""
    read: list[int] = []
    begun = 0

    def drain_requested() -> bool:  # asked as each step begins
        nonlocal begun
        if begun and begun % every == 0:
            read.append(held_bytes())
        begun += 1
        return False

    hooks = Hooks(generation=0, drain_requested=drain_requested, events=None)
    assert train(run_dir, 0, hooks) == FINISHED
    return [*read, held_bytes()]


def measure(task: str, place: Path, *, steps: int) -> list[int]:
    """Bytes held after each tenth of the steps of a task."""
    request = Request.read([recipe_of(task, place, steps=steps)], runs_here=True)
    attempt = first_attempt(request)
    attempt = begin(attempt)
    write_down(attempt, attempt.plan())
    (found,) = run_on_ranks(_train, 1, attempt.run_dir, max(1, steps // SAMPLES), timeout_s=3600)
    bytes_of: list[int] = found
    return bytes_of


def growth(held: Sequence[int]) -> int:
    """Bytes by which the most that is held later is above what a fifth of the steps left."""
    settled = held[len(held) // 5 - 1]
    return max(held[len(held) // 5 :]) - settled


def is_flat(held: Sequence[int]) -> bool:
    """Whether it is within the bar."""
    return growth(held) <= max(BYTES, SHARE * held[len(held) // 5 - 1])


def main(argv: list[str]) -> int:
    """Measure, print a line for each task, and write the raw result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flat_memory")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", choices=TASKS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    rows = {}
    for task in [asked.only] if asked.only else TASKS:
        with tempfile.TemporaryDirectory() as place:
            held = measure(task, Path(place), steps=asked.steps)
        rows[task] = {"held_bytes": held, "growth_bytes": growth(held), "is_flat": is_flat(held)}
        told = ", ".join(f"{each / 1e6:,.1f}" for each in held)
        print(f"{task}: {growth(held) / 1e6:+.1f} MB; held {told}", flush=True)
    content = {"steps": asked.steps, "bar": {"share": SHARE, "bytes": BYTES}, "tasks": rows}
    write_result("flat-memory", content, asked.out)
    return 0 if all(row["is_flat"] for row in rows.values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
