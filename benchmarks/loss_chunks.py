"""A loss in chunks beside one of all logits: step time and peak memory of head and loss.

Forward and backward pass of a head and its losses on the same hidden state, alternately (A B, B A,
...); value and gradients are compared once. Memory is counted from what torch's operators return
(the largest sum of live tensors beyond the inputs, by the log of the dry run on fake tensors), so
that it is the same on every machine.

    python -m benchmarks.loss_chunks --tokens 8192 --vocabulary 32000 --width 512 --chunk 1024
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
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import write_result
from shardyard import torch_private
from shardyard.parallel.loss import VocabLoss, loss_in_chunks
from shardyard.train.allocations import AllocationLog

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a hidden state (N, D), a head (V, D) and targets (N)."""


def main(given: list[str] | None = None) -> int:
    """Measure and write the result file."""
    args = _arguments(given)
    ways = _ways(args.chunk)
    x, weight, targets = _inputs(args)
    results = {way: _step(loss, x, weight, targets) for way, loss in ways.items()}
    chunked, whole = results["chunks"], results["whole"]
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(chunked, whole, strict=True)]
    step_s: dict[str, list[float]] = {way: [] for way in ways}
    for pair in range(1 + args.pairs):
        for way in list(ways) if pair % 2 == 0 else list(reversed(ways)):
            started = time.perf_counter()
            _step(ways[way], x, weight, targets)
            if pair:
                step_s[way].append(time.perf_counter() - started)
    ratios = [c / w for c, w in zip(step_s["chunks"], step_s["whole"], strict=True)]
    peaks = {way: _peak_bytes(loss, args) for way, loss in ways.items()}
    content: dict[str, Any] = {
        "load_average_before": os.getloadavg(),
        "sizes": {name: getattr(args, name) for name in ("tokens", "vocabulary", "width", "chunk")},
        "relative_difference": dict(zip(("loss", "of_x", "of_head"), apart, strict=True)),
        "step_s": step_s,
        "median_of_pair_ratios": statistics.median(ratios),
        "peak_bytes": peaks,
    }
    memory = peaks["chunks"] / peaks["whole"]
    print(f"chunks / whole: time {content['median_of_pair_ratios']:.2f}, memory {memory:.2f}")
    write_result("loss-chunks", content, args.out)
    return 0


def _ways(chunk: int) -> dict[str, Loss]:
    losses = VocabLoss()
    return {
        "whole": lambda x, weight, targets: losses(F.linear(x, weight), targets),
        "chunks": lambda x, weight, targets: loss_in_chunks(
            x, weight, None, targets, losses=losses, tokens=chunk
        ),
    }


def _inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.width, requires_grad=True)
    weight = (torch.randn(args.vocabulary, args.width) / args.width**0.5).requires_grad_()
    return x, weight, torch.randint(0, args.vocabulary, (args.tokens,))


def _step(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """Value and gradients."""
    value = loss(x, weight, targets)
    return [value.detach(), *torch.autograd.grad(value, [x, weight])]


def _peak_bytes(loss: Loss, args: argparse.Namespace) -> int:
    """Most bytes allocated at once, the inputs included."""
    log = AllocationLog(vocab_size=args.vocabulary, tokens=args.tokens, micro_batches=1)
    with torch_private.fake_tensors(), log:
        inputs = _inputs(args)
        log.begin_step()
        _step(loss, *inputs)
    return max(peak.bytes for peak in log.peaks())


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
