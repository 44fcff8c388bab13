"""Optimizer state in host memory: what an update takes and what memory it spares.

The two optimizers update equal models alternately (A B, B A, ...). Beside them the bare copies of
the same bytes are timed, both ways at once: of their time, what the offloaded update does not take
longer than the plain one is hidden. On an accelerator the peak is its allocator's; on a CPU the
copies are from host memory to host memory, and only their cost is of interest.

    python -m benchmarks.host_offload --width 4096 --matrices 24
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
from torch import nn

from benchmarks.record import write_result
from shardyard.config.schema import Optim
from shardyard.parallel.device import (
    CopyQueue,
    available_device,
    peak_memory_bytes,
    select_device,
    synchronize,
)
from shardyard.train.optim import ShardOptimizer
from shardyard.train.states_on_host import StatesOnHost


def main(given: list[str] | None = None) -> int:
    """Measure and write the result file."""
    args = _arguments(given)
    device = select_device(available_device(), 0)
    content: dict[str, Any] = {
        "load_average_before": os.getloadavg(),
        "elements": args.matrices * args.width**2,
        "optimizers": {name: _measure(name, args, device) for name in ("adamw", "sgd", "lamb")},
    }
    for name, found in content["optimizers"].items():
        print(f"{name}: offloaded / plain update {found['median_of_pair_ratios']:.2f}")
    write_result("host-offload", content, args.out)
    return 0


def _measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optim = Optim.model_validate({"name": name, "lr": 1e-3, "weight_decay": 0.1, **momentum})
    update_s: dict[str, list[float]] = {"plain": [], "offloaded": []}
    peaks = {way: _peak_bytes(way, optim, args, device) for way in update_s}
    updates = {way: _update(way, optim, args, device) for way in update_s}
    for pair in range(2 + args.pairs):
        for way in list(update_s) if pair % 2 == 0 else list(reversed(update_s)):
            seconds = _seconds(updates[way], device)
            if pair >= 2:
                update_s[way].append(seconds)
    moved_bytes = 4 * (1 if name == "sgd" else 2) * args.matrices * args.width**2
    copies_s = _copies_s(moved_bytes, args.pairs, device)
    plain_s, offloaded_s = (statistics.median(update_s[way]) for way in ("plain", "offloaded"))
    ratios = [o / p for p, o in zip(update_s["plain"], update_s["offloaded"], strict=True)]
    return {
        "update_s": update_s,
        "median_of_pair_ratios": statistics.median(ratios),
        "peak_bytes": peaks,
        "bytes_each_way": moved_bytes,
        "copies_both_ways_s": copies_s,
        "hidden_share_of_copies": 1 - max(0.0, offloaded_s - plain_s) / copies_s,
    }


def _update(
    way: str, optim: Optim, args: argparse.Namespace, device: torch.device
) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.matrices)]
    model = nn.Sequential(*layers).to(device)
    on_host = StatesOnHost(device) if way == "offloaded" else None
    optimizer = ShardOptimizer(model, optim, on_host=on_host)
    one, none = torch.ones((), device=device), torch.zeros((), device=device)

    def update() -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, 1e-3)
        optimizer.step(lr=1e-3, divisor=one, skip=none)
        optimizer.settle()

    return update


def _peak_bytes(
    way: str, optim: Optim, args: argparse.Namespace, device: torch.device
) -> int | None:
    """Of a model, its gradients and an update; None on a CPU: a process has one peak for all."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    _seconds(_update(way, optim, args, device), device)
    return peak_memory_bytes(device)


def _copies_s(nbytes: int, times: int, device: torch.device) -> float:
    """Median seconds of the bare copies, down and up beside each other."""
    down, up = CopyQueue(device), CopyQueue(device)
    there = torch.zeros(nbytes // 4, device=device)
    here = torch.zeros(nbytes // 4, pin_memory=device.type != "cpu")
    target = torch.zeros_like(here, pin_memory=device.type != "cpu")

    def copy() -> None:
        down.into_host(target, there)
        up.to_device(here)

    return statistics.median(_seconds(copy, device) for _ in range(times))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=1024, help="of square matrices")
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
