"""What ``precision.reduce=exact`` costs beside fp32: the time of a step, and bytes on the wire.

Both runs live in the same two gloo processes and step alternately (A B, B A, ...), a barrier before
each step, so that whatever else the machine does falls on both alike. One is ``llama-tiny``, whose
step is latency; the other a Llama of two wide blocks with 102 MiB of gradients. Both compute with
one thread. The bars: the median ratio of a pair is at most 1.10, and 1.25. Bytes are those that a
rank sends in one step to sum, as if each collective were a ring (``tests/distributed/traffic.py``).

    python -m benchmarks.exact_reduce
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.record import write_result
from benchmarks.step_overhead import interval, rounded
from shardyard.parallel.device import set_deterministic
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import make_run, prepare_corpus
from tests.distributed.traffic import Traffic

PROCESSES = 2
KINDS = ("fp32", "exact")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what a rank computes of it in a step."""

    bar: float
    seq_len: int
    micro_batch: int
    micro_batches: int
    config: dict[str, Any] | None = None
    """None: llama-tiny."""


WIDE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
CASES = {
    "llama-tiny": Case(bar=1.10, seq_len=256, micro_batch=4, micro_batches=2),
    "100 MiB": Case(bar=1.25, seq_len=256, micro_batch=4, micro_batches=1, config=WIDE),
}


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="measured pairs of steps")
    parser.add_argument("--case", action="append", choices=CASES, help="one of both alone")
    parser.add_argument("--strategy", default="FULL_SHARD", help="as parallel.strategy")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    cases = {}
    for name in args.case or CASES:
        cases[name] = found = measure(CASES[name], pairs=args.pairs, strategy=args.strategy)
        told = f"{found['ratio']:.3f} ({found['ratio_95'][0]:.3f} to {found['ratio_95'][1]:.3f})"
        sent = " and ".join(f"{kind} {found['sent_bytes'][kind]:,} bytes" for kind in KINDS)
        verdict = "met" if found["is_met"] else "MISSED"
        print(f"{name}: exact / fp32 {told}, bar {CASES[name].bar} {verdict}; a rank sends {sent}")
    is_met = all(case["is_met"] for case in cases.values())
    write_result("exact-reduce", {"is_met": is_met, "cases": cases}, args.out)
    return 0 if is_met else 1


def measure(case: Case, *, pairs: int, strategy: str, warm_up: int = 4) -> dict[str, Any]:
    """Median of pair ratios with a 95 % interval, step times, and bytes that a rank sends."""
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        runs = _runs(Path(scratch), case, steps=10 * (warm_up + pairs), strategy=strategy)
        by_rank = run_on_ranks(_measure, PROCESSES, runs, warm_up, pairs, timeout_s=3600.0)
    wall_s = {k: np.max([wall[k] for wall, _, _ in by_rank], axis=0).tolist() for k in KINDS}
    ratios = np.array(wall_s["exact"]) / np.array(wall_s["fp32"])
    ratio = float(np.median(ratios))
    return {
        "strategy": strategy,
        "processes": PROCESSES,
        "gradient_bytes": by_rank[0][2],
        "load_average_before": load,
        "ratio": ratio,
        "ratio_95": list(interval(ratios)),
        "bar": case.bar,
        "is_met": ratio <= case.bar,
        "sent_bytes": by_rank[0][1],
        "median_step_s": {kind: float(np.median(wall_s[kind])) for kind in KINDS},
        "step_times_s": rounded(wall_s),
    }


def _runs(scratch: Path, case: Case, *, steps: int, strategy: str) -> dict[str, RunDir]:
    corpus = prepare_corpus(scratch)
    model: dict[str, Any] = {"preset": "llama-tiny"}
    if case.config is not None:
        folder = scratch / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(case.config))
        model = {"preset": None, "path": str(folder), "weights": "random"}
    return {
        kind: make_run(
            scratch / kind,
            corpus,
            {
                "run": {"steps": steps},  # never its last step
                "model": model,
                "data": {"seq_len": case.seq_len},
                "optim": {
                    "lr": 1e-3,
                    "global_batch": PROCESSES * case.micro_batch * case.micro_batches,
                    "micro_batch": case.micro_batch,
                },
                "precision": {"reduce": kind},
                "parallel": {"strategy": strategy},
                "checkpoint": {"every": 10**6},
                "cluster": {"devices": PROCESSES},
            },
        )
        for kind in KINDS
    }


def _measure(
    runs: dict[str, RunDir], warm_up: int, pairs: int
) -> tuple[dict[str, list[float]], dict[str, int], int]:
    """On one rank: step both alternately; seconds of steps, bytes sent, bytes of gradients."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    trainings = {kind: set_up(run, 0, hooks, local_rank=0) for kind, run in runs.items()}
    set_deterministic(trainings["exact"].device, on=True)  # both with the same kernels
    steps = {kind: Loop(training).step for kind, training in trainings.items()}
    wall_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for pair in range(warm_up + pairs):
        for kind in KINDS if pair % 2 == 0 else reversed(KINDS):
            dist.barrier()
            started = time.perf_counter()
            steps[kind]()
            if pair >= warm_up:
                wall_s[kind].append(time.perf_counter() - started)
    sent = {kind: _sent(steps[kind]) for kind in KINDS}
    parameters = trainings["fp32"].task.model.parameters()
    gradient_bytes = 4 * sum(param.numel() for param in parameters)
    for training in trainings.values():
        training.close()
    return wall_s, sent, gradient_bytes


def _sent(step: Any) -> int:
    """Bytes that this rank sends in one step to sum."""
    with Traffic() as traffic:
        step()
    return sum(n for (_, kind), n in traffic.bytes.items() if kind != "all_gather")


if __name__ == "__main__":
    sys.exit(main())
