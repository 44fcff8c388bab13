"""A step of ``shardyard.wrap`` beside one of DistributedDataParallel, and of FSDP2.

Two processes hold both models and take their steps in turn, in pairs of changing order, so that
whatever else the machine does falls on both. A ratio is the median over pairs. The time to the
first step, from the model as it was built to the end of its first step, is measured in processes of
its own.

    OMP_NUM_THREADS=1 python -m benchmarks.wrapped_steps
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import shardyard
from benchmarks.record import write_result
from tests.distributed.ranks import run_on_ranks

RANKS, SAMPLES, SEQ_LEN, SIZE = 2, 4, 128, 1024
BAR = 1.02

Trained = tuple[Any, torch.optim.Optimizer]


def _built() -> Trained:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _by_ddp() -> Trained:
    model, optimizer = _built()
    return DistributedDataParallel(model), optimizer


def _by_fsdp() -> Trained:
    model, _ = _built()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _wrapped(words: str) -> Trained:
    os.environ["SHARDYARD_PARALLEL"] = words
    model, optimizer = _built()
    model, optimizer = shardyard.wrap(model, optimizer)
    return model, optimizer


PAIRS: dict[str, tuple[Callable[[], Trained], str]] = {
    "replicated, DistributedDataParallel": (_by_ddp, f"dp_replicate={RANKS},dp_shard=1"),
    "sharded, FSDP2": (_by_fsdp, f"dp_shard={RANKS},zero=3"),
}
"""What is compared -> torch's own, and the layout of wrap()."""


def _step_s(trained: Trained) -> float:
    model, optimizer = trained
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, SIZE, (SAMPLES, SEQ_LEN), generator=generator)
    dist.barrier()
    began_s = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began_s


def steps_in_pairs(name: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of torch's step and of ours, pair by pair."""
    theirs, words = PAIRS[name]
    both = [theirs(), _wrapped(words)]
    for each in both:
        for _ in range(3):
            _step_s(each)
    found = []
    for number in range(pairs):
        first = number % 2
        times_s = [0.0, 0.0]
        for place in (first, 1 - first):
            times_s[place] = _step_s(both[place])
        found.append((times_s[0], times_s[1]))
    return found


def first_step_s(name: str, is_ours: bool) -> float:
    """Seconds from nothing built to the end of the first step."""
    theirs, words = PAIRS[name]
    began_s = time.perf_counter()
    _step_s(_wrapped(words) if is_ours else theirs())
    return time.perf_counter() - began_s


def measure(pairs: int, starts: int) -> list[dict[str, Any]]:
    """A row for each comparison."""
    rows = []
    for name in PAIRS:
        times = run_on_ranks(steps_in_pairs, RANKS, name, pairs, timeout_s=600)[0]
        ratios = sorted(ours / theirs for theirs, ours in times)
        first: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(starts):
            for is_ours in (False, True):
                first[is_ours].append(max(run_on_ranks(first_step_s, RANKS, name, is_ours)))
        rows.append(
            {
                "compared": name,
                "pairs": pairs,
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [ratios[pairs // 4], ratios[3 * pairs // 4]],
                "torch_step_s": statistics.median(theirs for theirs, _ in times),
                "wrap_step_s": statistics.median(ours for _, ours in times),
                "torch_first_step_s": statistics.median(first[False]),
                "wrap_first_step_s": statistics.median(first[True]),
                "is_met": statistics.median(ratios) <= BAR,
            }
        )
    return rows


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = measure(given.pairs, given.starts)
    for row in rows:
        print(
            "{compared:40} {ratio:.3f} of a step, {torch_step_s:.3f} s; first step "
            "{torch_first_step_s:.2f} and {wrap_first_step_s:.2f} s".format(**row)
        )
    write_result("wrapped-steps", {"bar": BAR, "rows": rows}, given.out)
    return int(not all(row["is_met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
