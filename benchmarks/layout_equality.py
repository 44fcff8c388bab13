"""Every layout, process count and split of the batch computes what one process computes.

The same recipe is trained for 20 steps in fp32 by the real loop: five strategies, 1 to 4 processes
(3 does not divide the batch of 8), dropout off and on, and micro-batches of 1 to 8 samples. Each
run is held to one process with the whole batch in one micro-batch: losses and gradient norms of
the first five steps and of all, relative; the gradient norm of the first step; and its gradients,
per tensor, relative to the global gradient norm. A second model has tensors of one to two million
elements: a sum that is too coarse for those is right for the small ones.

    python -m benchmarks.layout_equality
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import write_result
from shardyard.data.loader import step_batches
from shardyard.io.files import write_json
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.distributed.whole import whole

STEPS = 20
FIRST_STEPS = 5
GLOBAL_BATCH = 8
BARS = {"step_1_norm": 1e-6, "first_five": 1e-5, "twenty": 1e-4, "step_1_gradients": 1e-5}
STRATEGIES = ("NO_SHARD", "ZERO_1", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
PROCESSES = (1, 2, 3, 4)
DROPOUTS = (0.0, 0.1)
SMALL, LARGE = "llama-tiny", "llama-wide"
WIDE = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 1024,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
"""Seven matrices of 1 M elements and two of 2 M."""
OF_WIDE = ("ZERO_1", "FULL_SHARD", "HYBRID_SHARD")
_RUNS_AT_ONCE = 20
"""Runs of one set of processes: each leaves process groups behind until its processes end."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the grid."""

    model: str
    strategy: str
    processes: int
    dropout: float
    micro_batch: int

    @property
    def name(self) -> str:
        layout = f"{self.strategy}-{self.processes}p"
        return f"{self.model}-{layout}-d{self.dropout}-m{self.micro_batch}"

    def sections(self, wide: Path) -> dict[str, dict[str, Any]]:
        """The settings in which runs of the grid differ; ``wide`` is the folder of that model."""
        parallel: dict[str, Any] = {"strategy": self.strategy}
        if self.strategy == "HYBRID_SHARD" and self.processes == 4:
            parallel["dp_shard"] = 2  # two copies of two halves; fewer processes make one copy
        model: dict[str, Any] = {"preset": self.model}
        if self.model == LARGE:
            model = {"preset": None, "path": str(wide), "weights": "random"}
        return {
            "run": {"steps": STEPS},
            "model": {"dropout": self.dropout, **model},
            "data": {"attend_across_documents": self.dropout == 0},  # so both masks are covered
            "optim": {"lr": 3e-3, "global_batch": GLOBAL_BATCH, "micro_batch": self.micro_batch},
            "parallel": parallel,
            "checkpoint": {"every": 10**6},
            "cluster": {"devices": self.processes},
        }


def main() -> int:
    """Run the grid, print the table, write the result file; returns 1 if a bar is missed."""
    args = _arguments()
    cells = grid(args.micro_batches, args.models)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        differences = measure(Path(scratch), cells)
    worst = {bar: max(found[bar] for found in differences.values()) for bar in BARS}
    is_met = all(worst[bar] <= limit for bar, limit in BARS.items())
    content = {
        "seconds": round(time.monotonic() - started, 1),
        "work": {
            "models": {SMALL: "a preset", LARGE: WIDE}, "seq_len": 32,
            "global_batch": GLOBAL_BATCH, "steps": STEPS,
            "precision": "fp32", "optimizer": "adamw, clipped at 1",
            "reference": "one process, the whole batch in one micro-batch",
        },
        "bars": BARS,
        "worst": worst,
        "is_met": is_met,
        "cells": [{**asdict(cell), **differences[cell]} for cell in cells],
    }  # fmt: skip
    write_result("layout-equality", content, args.out)
    print(table(differences))
    print(f"\n{len(cells)} runs; all bars met" if is_met else f"\n{len(cells)} runs; BAR MISSED")
    return 0 if is_met else 1


def grid(micro_batches: Sequence[int], models: Sequence[str] = (SMALL, LARGE)) -> list[Cell]:
    """All cells, those of one process count together."""
    cells = [
        Cell(
            model=SMALL, strategy=strategy, processes=processes, dropout=dropout,
            micro_batch=micro_batch,
        )
        for processes in PROCESSES
        for dropout in DROPOUTS
        for strategy in STRATEGIES
        for micro_batch in micro_batches
    ]  # fmt: skip
    cells += [
        Cell(model=LARGE, strategy=strategy, processes=processes, dropout=0.0, micro_batch=2)
        for processes in PROCESSES
        for strategy in OF_WIDE
    ]
    return [cell for cell in cells if cell.model in models]


def measure(scratch: Path, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Train all cells and the references; the differences of each cell, by the name of the bar."""
    corpus = prepare_corpus(scratch)
    (scratch / LARGE).mkdir()
    write_json(scratch / LARGE / "config.json", WIDE)
    reference_of = {
        cell: replace(cell, strategy="NO_SHARD", processes=1, micro_batch=GLOBAL_BATCH)
        for cell in cells
    }
    references = {
        cell: _results(folder)
        for cell, folder in _train(
            scratch / "references", corpus, dict.fromkeys(reference_of.values())
        )
    }
    return {
        cell: _differences(_results(folder), references[reference_of[cell]])
        for cell, folder in _train(scratch / "cells", corpus, cells)
    }


def _train(scratch: Path, corpus: Corpus, cells: Iterable[Cell]) -> Iterable[tuple[Cell, RunDir]]:
    """Train cells, many in each set of processes."""
    by_processes: dict[int, list[Cell]] = {}
    for cell in cells:
        by_processes.setdefault(cell.processes, []).append(cell)
    for processes, same in by_processes.items():
        for first in range(0, len(same), _RUNS_AT_ONCE):
            some = same[first : first + _RUNS_AT_ONCE]
            wide = scratch.parent / LARGE
            run_dirs = [make_run(scratch / cell.name, corpus, cell.sections(wide)) for cell in some]
            run_on_ranks(_train_on_rank, processes, run_dirs, timeout_s=1800.0)
            print(f"{processes} processes: {first + len(some)} of {len(same)}", file=sys.stderr)
            yield from zip(some, run_dirs, strict=True)


def _train_on_rank(run_dirs: Sequence[RunDir]) -> None:
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        gradients = _first_gradients(training)
        if training.rank == 0:
            np.savez(run_dir.path / "gradients.npz", allow_pickle=False, **gradients)
        loop = Loop(training)
        for _ in range(STEPS):
            loop.step()
        training.close()


def _first_gradients(training: Training) -> dict[str, npt.NDArray[np.float32]]:
    """Gradients of the first step, whole, divided by its tokens; no weight changes."""
    batches = step_batches(
        training.train_source,
        positions=range(GLOBAL_BATCH),
        micro_batch=int(training.resolved.recipe.optim.micro_batch),
        rank=training.rank,
        world_size=training.world_size,
    )
    tokens = training.stepper.accumulate(batches).divisor
    total = sum(training.gather(tokens))
    gradients = {}
    for name, param in training.task.model.named_parameters():
        assert param.grad is not None
        gradients[name] = (whole(param.grad) / total).numpy()
        param.grad = None
    return gradients


@dataclass(frozen=True, kw_only=True)
class _Results:
    lines: npt.NDArray[np.float64]
    """(steps, 2): loss and gradient norm."""
    gradients: dict[str, npt.NDArray[np.float32]]


def _results(run_dir: RunDir) -> _Results:
    lines = [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]
    assert len(lines) == STEPS
    with np.load(run_dir.path / "gradients.npz") as gradients:
        return _Results(lines=np.array(lines), gradients=dict(gradients))


def _differences(found: _Results, expected: _Results) -> dict[str, float]:
    relative = np.abs(found.lines / expected.lines - 1)
    assert found.gradients.keys() == expected.gradients.keys()
    norm = np.sqrt(
        sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.gradients.values())
    )
    per_tensor = [
        float(np.linalg.norm(found.gradients[name] - gradient)) / norm
        for name, gradient in expected.gradients.items()
    ]
    return {
        "step_1_norm": float(relative[0, 1]),
        "first_five": float(relative[:FIRST_STEPS].max()),
        "twenty": float(relative.max()),
        "step_1_gradients": max(per_tensor),
    }


def table(differences: dict[Cell, dict[str, float]]) -> str:
    """Markdown: one line per strategy and process count, the worst over dropout and micro-batch."""
    lines = [
        "| model | strategy | processes | runs | step-1 norm | first five steps | twenty steps "
        "| step-1 gradients |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model, strategy, processes in product((SMALL, LARGE), STRATEGIES, PROCESSES):
        rows = [
            found
            for cell, found in differences.items()
            if (cell.model, cell.strategy, cell.processes) == (model, strategy, processes)
        ]
        if rows:
            worst = " | ".join(f"{max(row[bar] for row in rows):.1e}" for bar in BARS)
            lines.append(f"| {model} | {strategy} | {processes} | {len(rows)} | {worst} |")
    bars = " | ".join(f"**{limit:.0e}**" for limit in BARS.values())
    return "\n".join([*lines, f"| bar | | | | {bars} |"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=list(range(1, GLOBAL_BATCH + 1)),
        help="samples of a micro-batch to try; default: all splits of the batch",
    )  # fmt: skip
    parser.add_argument(
        "--models", nargs="+", choices=(SMALL, LARGE), default=[SMALL, LARGE], help="default: both"
    )
    parser.add_argument("--out", type=Path, help="file of the result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
