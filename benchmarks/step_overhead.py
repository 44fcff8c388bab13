"""What the whole product step costs beside a bare FSDP2 loop of the same model.

Twice: for a language model of a known family, and for a module of one's own.

Both loops live in the same two gloo processes and step alternately (A B, B A, ...), a barrier
before each step, so that whatever else the machine does falls on both alike. Ours is ``Loop.step``
with all it does: data order, read-ahead, global token count, non-finite skip, metrics line, drain
and checkpoint polls. The bar: median ratio of a pair and ratio of medians are both at most 1.03.
CPU time, which a busy neighbour changes less than wall time, is recorded beside it and judges
nothing.

    python -m benchmarks.step_overhead
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import own_convolutions
from benchmarks.bare_loop import BareLoop, sharded_llama, sharded_module
from benchmarks.record import write_result
from shardyard.config.resolved import Resolved
from shardyard.data.shards import TokenShards
from shardyard.models.build import hf_config
from shardyard.rundir.layout import RunDir
from shardyard.tasks.language import vocabulary
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import make_run, prepare_corpus

BAR = 1.03
PROCESSES = 2
_OWN_MODULE = {"preset": None, "module": "benchmarks.own_convolutions:build", "blocks": ["blocks"]}
Floats = npt.NDArray[np.float64]
StepTimes = dict[str, list[float]]
"""Loop -> seconds of each of its steps, in order."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both loops do in one step, per rank, and how often."""

    preset: str | None = "llama-laptop"
    """None: a module of one's own, ``own_convolutions``."""
    seq_len: int = 256
    micro_batch: int = 4
    micro_batches: int = 2
    warm_up: int = 6
    pairs: int = 80


CASES: dict[str, str | None] = {"language model": "llama-laptop", "own module": None}
"""Name -> preset."""


def main() -> int:
    """Measure, print, write the result file; returns 1 if the bar is missed."""
    args = _arguments()
    cases = {}
    for name in args.case or CASES:
        cases[name] = measure(Work(preset=CASES[name], pairs=args.pairs))
        print(f"{name}: {_line(cases[name])}")
    is_met = all(case["is_met"] for case in cases.values())
    write_result("step-overhead", {"bar": BAR, "is_met": is_met, "cases": cases}, args.out)
    return 0 if is_met else 1


def measure(work: Work) -> dict[str, Any]:
    """Both loops of one case: medians, ratios, and the raw step times."""
    load_before = os.getloadavg()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        wall_s, cpu_s = _run(Path(scratch), work)
    summary = summarize(wall_s)
    return {
        "seconds": round(time.monotonic() - started, 1),
        "work": {**asdict(work), "processes": PROCESSES, "compute": "fp32", "layout": "FULL_SHARD"},
        "load_average_before": load_before,
        "is_met": summary["median_of_pair_ratios"] <= BAR and summary["ratio_of_medians"] <= BAR,
        **summary,
        "cpu_time": summarize(cpu_s),
        "step_times_s": rounded(wall_s),
        "step_cpu_times_s": rounded(cpu_s),
    }


def summarize(times: StepTimes) -> dict[str, Any]:
    """Medians, ratios and a 95 % bootstrap interval over pairs, from the raw step times."""
    ours, bare = np.array(times["shardyard"]), np.array(times["bare"])
    low, high = interval(ours / bare)
    return {
        "median_step_s": {"shardyard": float(np.median(ours)), "bare": float(np.median(bare))},
        "ratio_of_medians": float(np.median(ours) / np.median(bare)),
        "median_of_pair_ratios": float(np.median(ours / bare)),
        "median_of_pair_ratios_95": [low, high],
    }


def rounded(times: StepTimes) -> StepTimes:
    return {name: [round(seconds, 6) for seconds in steps] for name, steps in times.items()}


def interval(ratios: Floats) -> tuple[float, float]:
    random = np.random.default_rng(0)
    resampled = random.choice(ratios, size=(4000, len(ratios)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return float(low), float(high)


def _run(scratch: Path, work: Work) -> tuple[StepTimes, StepTimes]:
    """Wall time, from the barrier to the end of the slowest rank, and CPU time of all ranks."""
    corpus = prepare_corpus(scratch)
    samples = PROCESSES * work.micro_batch * work.micro_batches
    run_dir = make_run(
        scratch / "run",
        corpus,
        {
            "run": {"steps": 10 * (work.warm_up + work.pairs)},  # never its last step
            "model": {"preset": work.preset} if work.preset else _OWN_MODULE,
            "data": {"seq_len": work.seq_len},
            "optim": {"lr": 1e-3, "global_batch": samples, "micro_batch": work.micro_batch},
            "parallel": {"strategy": "FULL_SHARD"},
            "checkpoint": {"every": 10**6},
            "cluster": {"devices": PROCESSES},
        },
    )
    by_rank = run_on_ranks(_measure, PROCESSES, run_dir, work, timeout_s=3600.0)
    names = by_rank[0][0].keys()
    wall_s = {name: np.max([wall[name] for wall, _ in by_rank], axis=0).tolist() for name in names}
    cpu_s = {name: np.sum([cpu[name] for _, cpu in by_rank], axis=0).tolist() for name in names}
    return wall_s, cpu_s


def _measure(run_dir: RunDir, work: Work) -> tuple[StepTimes, StepTimes]:
    """On one rank: step both loops alternately; wall and CPU seconds of the steps."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    resolved = training.resolved
    shards = TokenShards(Path(resolved.data.dir), "train")
    bare = BareLoop(
        _bare_model(resolved, work),
        shards.read(0, shards.num_tokens),
        device=torch.device("cpu"),
        micro_batch=work.micro_batch,
        micro_batches=work.micro_batches,
        seq_len=work.seq_len,
        lr=1e-3,
        seed=training.rank,
        logits=None if work.preset else own_convolutions.logits,
    )
    steps: dict[str, Callable[[], Any]] = {"shardyard": Loop(training).step, "bare": bare.step}
    wall_s: StepTimes = {name: [] for name in steps}
    cpu_s: StepTimes = {name: [] for name in steps}
    for pair in range(work.warm_up + work.pairs):
        order = list(steps) if pair % 2 == 0 else list(reversed(steps))
        for name in order:
            dist.barrier()
            started, started_cpu = time.perf_counter(), time.process_time()
            steps[name]()
            if pair >= work.warm_up:
                wall_s[name].append(time.perf_counter() - started)
                cpu_s[name].append(time.process_time() - started_cpu)
    training.close()
    return wall_s, cpu_s


def _bare_model(resolved: Resolved, work: Work) -> nn.Module:
    """The same model as ours, sharded by hand."""
    if resolved.shape is not None:
        config = hf_config(resolved.shape)
        llama: nn.Module = sharded_llama(
            config, device=torch.device("cpu"), compute=torch.float32, recompute=False
        )
        return llama
    model, _ = own_convolutions.build(vocab_size=vocabulary(resolved), seq_len=work.seq_len)
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    return sharded_module(model, list(blocks))


def _line(content: dict[str, Any]) -> str:
    medians, (low, high) = content["median_step_s"], content["median_of_pair_ratios_95"]
    return (
        f"median step: shardyard {medians['shardyard'] * 1e3:.1f} ms, bare "
        f"{medians['bare'] * 1e3:.1f} ms; ratio of medians {content['ratio_of_medians']:.4f}, "
        f"median of pair ratios {content['median_of_pair_ratios']:.4f} ({low:.4f} to {high:.4f}); "
        f"bar {BAR}: {'met' if content['is_met'] else 'MISSED'}; "
        f"CPU time: {content['cpu_time']['median_of_pair_ratios']:.4f}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=Work.pairs, help="measured pairs of steps")
    parser.add_argument("--case", action="append", choices=CASES, help="one of both alone")
    parser.add_argument("--out", type=Path, help="file of the result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
