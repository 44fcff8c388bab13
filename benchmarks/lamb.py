"""LAMB on sharded matrices beside LAMB by hand, of whole ones in one process.

A small Llama trains for twenty steps by the real loop in fp32: in one process, and on ranks that
split samples, states, weights, matrices, blocks and tokens, alone and together. Each run is held to
transformers' own model in a plain loop with the LAMB of ``tests/train/lamb.py``, which shares no
code with the product: losses and gradient norms of each step, relative; and each tensor after
twenty steps, relative to its norm. The reference is computed twice, in fp32 and with weights,
gradients and updates in fp64 (transformers' norms stay in fp32). One bar is for both.

    python -m benchmarks.lamb
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.record import write_result
from shardyard.config.rules.custom_module import require_shape
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.train.lamb import Lamb

STEPS, BATCH = 20, 6
BAR = 1e-6
LR, BETAS, EPS, DECAY, CLIP = 0.01, (0.9, 0.999), 1e-6, 0.1, 1.0
"""The rate moves each matrix by 1 % of its norm a step."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "two copies": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "ZeRO 1": (2, {"zero": 1, "dp_shard": 2}),
    "ZeRO 2": (2, {"zero": 2, "dp_shard": 2}),
    "ZeRO 3": (2, {"zero": 3, "dp_shard": 2}),
    "tp 2": (2, {"tp": 2}),
    "pp 2": (2, {"pp": 2, "zero": 1}),
    "cp 2": (2, {"cp": 2}),
    "ZeRO 3 on 3": (3, {"zero": 3, "dp_shard": 3}),
    "two copies of ZeRO 3": (4, {"zero": 3, "dp_shard": 2, "dp_replicate": 2}),
    "tp 2, ZeRO 1": (4, {"tp": 2, "zero": 1, "dp_shard": 2}),
    "tp 2, ZeRO 3": (4, {"tp": 2, "zero": 3, "dp_shard": 2}),
}
"""Layout -> processes, and settings of ``parallel``."""

REFERENCES = ("beside_fp32", "beside_fp64")

Weights = dict[str, Tensor]
Lines = list[tuple[float, float]]


def main() -> int:
    """Train, compare, print the table, write the result file; returns 1 if the bar is missed."""
    args = _arguments()
    layouts = {name: LAYOUTS[name] for name in args.layouts}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        cells = measure(Path(scratch), layouts)
    worst = {
        measure: max(cell[beside][measure] for cell in cells for beside in REFERENCES)
        for measure in cells[0][REFERENCES[0]]
    }
    is_met = max(worst.values()) <= BAR
    content = {
        "seconds": round(time.monotonic() - started, 1),
        "work": {
            "model": "llama-tiny", "seq_len": 32, "global_batch": BATCH, "steps": STEPS,
            "precision": "fp32", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY,
            "grad_clip": CLIP,
            "reference": "one process, the whole batch at once, transformers' model, LAMB by hand",
        },
        "bar": BAR,
        "worst": worst,
        "is_met": is_met,
        "cells": cells,
    }  # fmt: skip
    write_result("lamb", content, args.out)
    print(table(cells))
    return 0 if is_met else 1


def measure(
    scratch: Path, layouts: Mapping[str, tuple[int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """How far each layout is from both references."""
    corpus = prepare_corpus(scratch)
    alone = _made(scratch / "alone", corpus, 1, {})
    ((first, *references),) = run_on_ranks(_by_hand, 1, alone, timeout_s=600.0)
    cells = []
    for number, (name, (processes, parallel)) in enumerate(layouts.items()):
        run_dir = _made(scratch / str(number), corpus, processes, parallel)
        by_rank = run_on_ranks(_by_product, processes, run_dir, timeout_s=600.0)
        weights = {key: tensor for rank in by_rank for key, tensor in rank.items()}
        lines = [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]
        beside = (_apart(lines, weights, *reference) for reference in references)
        cells.append(
            {
                "layout": name, "processes": processes, "parallel": parallel,
                **dict(zip(REFERENCES, beside, strict=True)),
                "moved": min(_norm(weights[key] - x) / _norm(x) for key, x in first.items()),
            }
        )  # fmt: skip
        print(f"{name}: {cells[-1]['beside_fp32']}", file=sys.stderr)
    return cells


def _made(folder: Path, corpus: Corpus, processes: int, parallel: dict[str, Any]) -> RunDir:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "optim": {
            "name": "lamb", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY,
            "grad_clip": CLIP, "schedule": "constant", "warmup_steps": 0, "global_batch": BATCH,
            "micro_batch": 3 if processes < 3 else 1,
        },
        "parallel": parallel,
        "precision": {"compute": "fp32"},
        "cluster": {"devices": processes},
        "checkpoint": {"every": 10**6},
    }  # fmt: skip
    return make_run(folder, corpus, sections)


def _open(run_dir: RunDir) -> Training:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return set_up(run_dir, 0, hooks, local_rank=0)


def _by_product(run_dir: RunDir) -> Weights:
    training = _open(run_dir)
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    weights = _weights(training)
    training.close()
    return weights


def _weights(training: Training) -> Weights:
    """Whole ones; with a pipeline those of this rank's stage."""
    tensors = training.tensors.items()
    held = {key.removeprefix("model."): x for key, x in tensors if key.startswith("model.")}
    return {key: _whole(x).detach().clone() for key, x in held.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _by_hand(run_dir: RunDir) -> tuple[Weights, tuple[Lines, Weights], tuple[Lines, Weights]]:
    """The weights that all begin with, and of each reference its lines and its last weights."""
    training = _open(run_dir)
    first = _weights(training)
    found = [_plain_loop(training, first, dtype) for dtype in (torch.float32, torch.float64)]
    training.close()
    return first, found[0], found[1]


def _plain_loop(training: Training, first: Weights, dtype: torch.dtype) -> tuple[Lines, Weights]:
    model = AutoModelForCausalLM.from_config(hf_config(require_shape(training.resolved.shape)))
    model.load_state_dict(first)
    model.to(dtype)
    lamb = Lamb(model.parameters(), lr=LR, decay=DECAY, betas=BETAS, eps=EPS)
    lines = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        logits: Tensor = model(input_ids=batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        lamb.step()
        lamb.zero_grad()
        lines.append((float(loss.detach()), float(norm)))
    return lines, {name: param.detach() for name, param in model.named_parameters()}


def _apart(lines: Lines, weights: Weights, wanted: Lines, expected: Weights) -> dict[str, float]:
    assert len(lines) == len(wanted) and weights.keys() == expected.keys()
    pairs = list(zip(lines, wanted, strict=True))
    return {
        "losses": max(abs(found[0] / line[0] - 1) for found, line in pairs),
        "gradient_norms": max(abs(found[1] / line[1] - 1) for found, line in pairs),
        "weights": max(_norm(weights[key] - x) / _norm(x) for key, x in expected.items()),
    }


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, one line a layout."""
    measures = list(cells[0][REFERENCES[0]])
    heads = [f"{each} {beside}" for beside in REFERENCES for each in measures]
    heads = [head.replace("_", " ") for head in heads]
    rows = ["| layout | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for cell in cells:
        values = [each for beside in REFERENCES for each in cell[beside].values()]
        rows.append(f"| {cell['layout']} | " + " | ".join(f"{each:.1e}" for each in values) + " |")
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, help="file of the result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
