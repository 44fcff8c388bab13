"""Every mesh axis, alone and with the others, computes what one process computes.

Each layout trains a small model for ten steps of SGD in fp32 by the real loop and is held to one
process with the whole batch in one micro-batch: losses and gradient norms of each step, relative;
step-1 gradients and the weights after ten steps, per tensor, relative to the global norm. Then each
goes on from the checkpoint of another layout for three steps, and is held to the process that was
never stopped.

    python -m benchmarks.axis_grid [--models dense moe] [--processes 2 4 8]
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.record import write_result
from shardyard.config.layout import Layout
from shardyard.data.loader import step_batches
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus

STEPS = 10
STEPS_AFTER = 3
GLOBAL_BATCH = 8
BARS = {"steps": 1e-5, "step_1_gradients": 1e-5, "weights": 1e-5, "steps_after_load": 1e-5}
_RUNS_AT_ONCE = 4
"""Runs of one set of processes: each leaves process groups behind until its processes end."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout of one model."""

    model: str
    processes: int = 1
    parallel: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    micro_batch: int = 1
    recompute: str = "none"

    @property
    def name(self) -> str:
        """Such as ``dense-4p-tp2-pp2``."""
        degrees = [f"{axis}{value}" for axis, value in self.parallel]
        marks = [
            *(["dropout"] if self.dropout else []),
            *([f"recompute-{self.recompute}"] if self.recompute != "none" else []),
        ]
        return "-".join([self.model, f"{self.processes}p", *degrees, *marks])

    @property
    def reference(self) -> "Cell":
        """One process, the whole batch in one micro-batch."""
        return Cell(model=self.model, dropout=self.dropout, micro_batch=GLOBAL_BATCH)

    def sections(self) -> dict[str, dict[str, Any]]:
        """The recipe's settings."""
        return {
            "run": {"steps": STEPS + STEPS_AFTER},
            "model": {"preset": MODELS[self.model], "dropout": self.dropout},
            "task": {"name": "masked_lm" if self.model == "bert" else "causal_lm"},
            "data": {"attend_across_documents": self.dropout == 0},  # so both masks are covered
            "optim": {
                "name": "sgd", "lr": 0.02, "momentum": 0.9, "schedule": "constant",
                "global_batch": GLOBAL_BATCH, "micro_batch": self.micro_batch,
            },
            "parallel": dict(self.parallel),
            "memory": {"recompute": self.recompute},
            "checkpoint": {"every": 10**6},
            "cluster": {"devices": self.processes},
        }  # fmt: skip


MODELS: dict[str, str] = {"dense": "llama-tiny-deep", "bert": "bert-tiny", "moe": "mixtral-tiny"}
"""Model of the grid -> preset."""


def _cells(
    model: str, layouts: Mapping[int, Sequence[dict[str, Any]]], **others: Any
) -> list[Cell]:
    return [
        Cell(model=model, processes=processes, parallel=tuple(layout.items()), **others)
        for processes, same in layouts.items()
        for layout in same
    ]


def _layouts(model: str) -> dict[int, list[dict[str, Any]]]:
    """Processes -> degrees: every axis, every pair of them, and the triples that are used."""
    ulysses = {"cp": 2, "cp_exchange": "heads"}
    layouts: dict[int, list[dict[str, Any]]] = {
        2: [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, ulysses],
        4: [
            {"tp": 2, "dp_shard": 2, "zero": 1},
            {"tp": 2, "dp_shard": 2, "zero": 2},
            {"tp": 2, "dp_shard": 2, "zero": 3},
            {"tp": 2, "dp_replicate": 2},
            {"cp": 2, "dp_shard": 2},
            {"cp": 2, "dp_replicate": 2, "zero": 2},
            {"tp": 2, "cp": 2},
            {"tp": 2, **ulysses},
        ],
        8: [
            {"tp": 2, "dp_replicate": 2, "dp_shard": 2},
            {"tp": 2, "cp": 2, "dp_shard": 2},
        ],
    }
    if model != "bert":  # its head is its table of tokens, which no two stages can share
        layouts[2] += [{"pp": 2}, {"pp": 2, "schedule": "gpipe"}]
        layouts[4] += [
            {"pp": 2, "dp_shard": 2, "zero": 1},
            {"pp": 2, "dp_shard": 2, "zero": 3},
            {"pp": 2, "dp_replicate": 2},
            {"pp": 2, "tp": 2},
            {"pp": 2, "cp": 2},
            {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "dp_shard": 2},
            {"pp": 2, "schedule": "zero-bubble", "dp_shard": 2, "zero": 2},
            {"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "tp": 2},
            {"pp": 4},
        ]
        layouts[8] += [
            {"pp": 2, "tp": 2, "dp_shard": 2},
            {"pp": 2, "tp": 2, "cp": 2},
            {"pp": 2, "cp": 2, "dp_shard": 2},
        ]
    if model == "moe":
        layouts[4] = [each for each in layouts[4] if _stages(each) <= 2]  # as many as it has blocks
        layouts[2] += [{"ep": 2, "dp_shard": 2}]
        layouts[4] += [
            {"ep": 4, "dp_shard": 4},
            {"ep": 2, "dp_shard": 4, "zero": 2},
            {"ep": 2, "dp_shard": 2, "dp_replicate": 2},
            {"ep": 2, "dp_shard": 2, "tp": 2},
            {"ep": 2, "dp_shard": 2, "pp": 2},
            {"ep": 2, "cp": 2, "dp_shard": 2},
        ]
        layouts[8] += [
            {"ep": 2, "dp_shard": 2, "tp": 2, "pp": 2},
            {"ep": 2, "cp": 2, "tp": 2, "dp_shard": 2},
        ]
    return layouts


def _stages(parallel: dict[str, Any]) -> int:
    return int(parallel.get("pp", 1) * parallel.get("virtual_stages", 1))


def grid() -> list[Cell]:
    """All cells, those of one process count together."""
    dense = _cells("dense", _layouts("dense"))
    dropped = [replace(cell, dropout=0.1, micro_batch=2) for cell in dense]
    redone = [replace(dropped[1], recompute=how) for how in ("full", "selective")]
    bert = _cells("bert", _layouts("bert"), dropout=0.1, micro_batch=2)
    moe = _cells("moe", _layouts("moe"), dropout=0.1)
    return sorted([*dense, *dropped, *redone, *bert, *moe], key=lambda cell: cell.processes)


def main() -> int:
    """Run the grid, print the table, write the result file; returns 1 if a bar is missed."""
    args = _arguments()
    cells = [
        cell for cell in grid() if cell.model in args.models and cell.processes in args.processes
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        differences = measure(Path(scratch), cells)
    worst = {bar: max(found[bar] for found in differences.values()) for bar in BARS}
    is_met = all(worst[bar] <= limit for bar, limit in BARS.items())
    content = {
        "seconds": round(time.monotonic() - started, 1),
        "work": {
            "models": MODELS, "seq_len": 32, "global_batch": GLOBAL_BATCH, "steps": STEPS,
            "steps_after_load": STEPS_AFTER, "precision": "fp32",
            "optimizer": "sgd with momentum 0.9, clipped at 1",
            "reference": "one process, the whole batch in one micro-batch",
        },
        "bars": BARS,
        "worst": worst,
        "is_met": is_met,
        "cells": [
            {"name": cell.name, **asdict(cell), **differences[cell]} for cell in cells
        ],
    }  # fmt: skip
    write_result("axis-grid", content, args.out)
    print(table(differences))
    print(f"\n{len(cells)} layouts; all bars met" if is_met else f"\n{len(cells)}; BAR MISSED")
    return 0 if is_met else 1


def measure(scratch: Path, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Train all cells and the references, let each go on from another's checkpoint, compare."""
    corpus = prepare_corpus(scratch)
    references = list(dict.fromkeys(cell.reference for cell in cells))
    folders = _on_ranks(scratch / "to-ten", corpus, [*references, *cells], _to_ten)
    whole = {cell: _results(folders[cell]) for cell in references}
    differences = {
        cell: _differences(_results(folders[cell]), whole[cell.reference]) for cell in cells
    }
    # each loads what the next of its model and dropout has written: of another layout
    writer_of = {cell: _next_of_its_kind(cell, cells) for cell in cells}
    after = scratch / "after"
    _copy_checkpoints(after, corpus, {cell: folders[writer] for cell, writer in writer_of.items()})
    reloaded = _on_ranks(after, corpus, [*references, *cells], _go_on, made=True)
    for cell in cells:
        expected, found = (_steps(reloaded[each]) for each in (cell.reference, cell))
        differences[cell]["steps_after_load"] = float(np.abs(found / expected - 1).max())
    return differences


def _next_of_its_kind(cell: Cell, cells: Sequence[Cell]) -> Cell:
    same = [other for other in cells if other.reference == cell.reference]
    return same[(same.index(cell) + 1) % len(same)]


def _copy_checkpoints(scratch: Path, corpus: Corpus, source_of: dict[Cell, RunDir]) -> None:
    """Make run folders that begin from another layout's checkpoint; references from none."""
    sources = {**{cell.reference: None for cell in source_of}, **source_of}
    for cell, source in sources.items():
        run_dir = make_run(scratch / cell.name, corpus, cell.sections())
        if source is not None:
            shutil.copytree(source.checkpoints, run_dir.checkpoints)


def _on_ranks(
    scratch: Path,
    corpus: Corpus,
    cells: Sequence[Cell],
    function: Callable[[list[RunDir]], None],
    *,
    made: bool = False,
) -> dict[Cell, RunDir]:
    """Run cells, many in each set of processes; returns their folders."""
    folders: dict[Cell, RunDir] = {}
    for processes, some in _batches(cells):
        for cell in some:
            run_dir = RunDir(scratch / cell.name)
            folders[cell] = run_dir if made else make_run(run_dir.path, corpus, cell.sections())
        run_on_ranks(function, processes, [folders[cell] for cell in some], timeout_s=1800.0)
        print(f"{scratch.name}: {len(folders)} of {len(cells)}", file=sys.stderr)
    return folders


def _batches(cells: Sequence[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    by_processes: dict[int, list[Cell]] = {}
    for cell in cells:
        by_processes.setdefault(cell.processes, []).append(cell)
    for processes, same in by_processes.items():
        for first in range(0, len(same), _RUNS_AT_ONCE):
            yield processes, same[first : first + _RUNS_AT_ONCE]


def _to_ten(run_dirs: list[RunDir]) -> None:
    """On each rank: step-1 gradients, ten steps, the weights, a checkpoint."""
    for run_dir in run_dirs:
        training = set_up(run_dir, 0, _hooks(), local_rank=0)
        _write(training, "gradients", _first_gradients(training))
        loop = Loop(training)
        _take(loop, STEPS)
        weights = {
            name.removeprefix("model."): _whole(tensor)
            for name, tensor in training.tensors.items()
            if name.startswith("model.")
        }
        _write(training, "weights", weights)
        loop._save()
        training.saver.wait()
        training.close()


def _go_on(run_dirs: list[RunDir]) -> None:
    """On each rank: steps 11 to 13; from the checkpoint that is there, or from the beginning."""
    for run_dir in run_dirs:
        training = set_up(run_dir, 0, _hooks(), local_rank=0)
        _take(Loop(training), STEPS + STEPS_AFTER - training.progress.step)
        training.close()


def _take(loop: Loop, steps: int) -> None:
    for _ in range(steps):
        loop.step()
    loop._read_result()


def _hooks() -> Hooks:
    return Hooks(generation=0, drain_requested=lambda: False, events=None)


def _first_gradients(training: Training) -> dict[str, Array]:
    """Gradients of the first step, whole, divided by its tokens; no weight changes."""
    layout: Layout = training.mesh.layout
    batches = step_batches(
        training.train_source,
        positions=range(GLOBAL_BATCH),
        micro_batch=int(training.resolved.recipe.optim.micro_batch),
        rank=training.mesh.data_rank,
        world_size=layout.data_ranks,
    )
    tokens = training.stepper.accumulate(batches).divisor
    counted = training.gather(tokens if training.mesh.speaks_for_samples else 0)
    gradients = {}
    for name, param in training.task.model.named_parameters():
        assert param.grad is not None
        gradients[name] = _whole(param.grad) / sum(counted)
        param.grad = None
    return gradients


def _whole(tensor: Tensor) -> Array:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    array: Array = whole.detach().to(torch.float32).numpy().copy()
    return array


def _write(training: Training, kind: str, arrays: dict[str, Array]) -> None:
    """One file a stage, written by the first rank of each."""
    mesh = training.mesh
    if mesh.data_rank == mesh.context_rank == mesh.tensor_rank == 0:
        path = training.run_dir.path / f"{kind}-{mesh.stage_rank}.npz"
        np.savez(path, allow_pickle=False, **arrays)


@dataclass(frozen=True, kw_only=True)
class _Results:
    steps: npt.NDArray[np.float64]
    """(steps, 2): loss and gradient norm."""
    gradients: dict[str, Array]
    weights: dict[str, Array]


def _steps(run_dir: RunDir) -> npt.NDArray[np.float64]:
    """Loss and gradient norm of the steps after the tenth."""
    lines = [line for line in read_steps(run_dir.metrics) if line["step"] > STEPS]
    assert len(lines) == STEPS_AFTER
    return np.array([(line["loss"], line["grad_norm"]) for line in lines])


def _results(run_dir: RunDir) -> _Results:
    lines = [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]
    assert len(lines) == STEPS
    return _Results(
        steps=np.array(lines),
        gradients=_read(run_dir, "gradients"),
        weights=_read(run_dir, "weights"),
    )


def _read(run_dir: RunDir, kind: str) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for path in sorted(run_dir.path.glob(f"{kind}-*.npz")):
        with np.load(path) as found:
            arrays.update(found)
    return arrays


def _differences(found: _Results, expected: _Results) -> dict[str, float]:
    return {
        "steps": float(np.abs(found.steps / expected.steps - 1).max()),
        "step_1_gradients": _worst_tensor(found.gradients, expected.gradients),
        "weights": _worst_tensor(found.weights, expected.weights),
    }


def _worst_tensor(found: dict[str, Array], expected: dict[str, Array]) -> float:
    """The largest difference of a tensor, relative to the norm of all of them."""
    assert found.keys() == expected.keys()
    norm = np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in expected.values()))
    worst = max(float(np.linalg.norm(found[name] - expected[name])) for name in expected)
    return float(worst / norm)


def table(differences: dict[Cell, dict[str, float]]) -> str:
    """Markdown, one line a layout."""
    lines = ["| layout | " + " | ".join(BARS) + " |", "|---|" + "---:|" * len(BARS)]
    for cell, found in differences.items():
        lines.append(f"| {cell.name} | " + " | ".join(f"{found[bar]:.1e}" for bar in BARS) + " |")
    bars = " | ".join(f"**{limit:.0e}**" for limit in BARS.values())
    return "\n".join([*lines, f"| bar | {bars} |"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--out", type=Path, help="file of the result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
