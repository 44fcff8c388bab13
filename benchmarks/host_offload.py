"""Optimizer state, or also weights, in host memory: what it takes and what memory it spares.

The two optimizers update equal models alternately (A B, B A, ...). Beside them the bare copies of
the same bytes are timed, both ways at once: of their time, what the offloaded update does not take
longer than the plain one is hidden. On an accelerator the peak is its allocator's; on a CPU the
copies are from host memory to host memory, and only their cost is of interest.

``weights`` times whole steps of a stack of blocks at zero 3 in the same way, with and without
memory.offload=params: what of the gathers' and gradients' copies compute hides.

    python -m benchmarks.host_offload --width 4096 --matrices 24
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # built in C++
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.record import write_result
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Optim
from shardyard.parallel.device import (
    CopyQueue,
    available_device,
    peak_memory_bytes,
    process_group_backend,
    select_device,
    synchronize,
)
from shardyard.parallel.fsdp import Groups, shard_groups
from shardyard.parallel.mesh import Mesh, build_mesh
from shardyard.train.optim import ShardOptimizer
from shardyard.train.optimizer_offload import StatesOnHost

WAYS = ("plain", "offloaded")


def main(given: list[str] | None = None) -> int:
    """Measure and write the result file."""
    args = _arguments(given)
    device = select_device(available_device(), 0)
    content: dict[str, Any] = {
        "load_average_before": os.getloadavg(),
        "elements": args.matrices * args.width**2,
        "optimizers": {name: _measure(name, args, device) for name in ("adamw", "sgd", "lamb")},
    }
    content["weights"] = _measure_weights(args, device)
    for name, found in content["optimizers"].items():
        print(f"{name}: offloaded / plain update {found['median_of_pair_ratios']:.2f}")
    print(f"weights: offloaded / plain step {content['weights']['median_of_pair_ratios']:.2f}")
    write_result("host-offload", content, args.out)
    return 0


def _measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optim = Optim.model_validate({"name": name, "lr": 1e-3, "weight_decay": 0.1, **momentum})
    peaks = {way: _peak_bytes(partial(_update, way, optim, args, device), device) for way in WAYS}
    updates = {way: _update(way, optim, args, device) for way in WAYS}
    update_s = _alternately(updates, args.pairs, device)
    moved_bytes = 4 * (1 if name == "sgd" else 2) * args.matrices * args.width**2
    copies_s = _copies_s(moved_bytes, args.pairs, device)
    plain_s, offloaded_s = (statistics.median(update_s[way]) for way in ("plain", "offloaded"))
    return {
        "update_s": update_s,
        "median_of_pair_ratios": _median_ratio(update_s),
        "peak_bytes": peaks,
        "bytes_each_way": moved_bytes,
        "copies_both_ways_s": copies_s,
        "hidden_share_of_copies": 1 - max(0.0, offloaded_s - plain_s) / copies_s,
    }


def _alternately(
    works: Mapping[str, Callable[[], None]], pairs: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each, after two pairs that are not counted."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for pair in range(2 + pairs):
        for way in WAYS if pair % 2 == 0 else reversed(WAYS):
            seconds = _seconds(works[way], device)
            if pair >= 2:
                found[way].append(seconds)
    return found


def _median_ratio(seconds: Mapping[str, Sequence[float]]) -> float:
    pairs = zip(seconds["plain"], seconds["offloaded"], strict=True)
    return statistics.median(offloaded / plain for plain, offloaded in pairs)


def _measure_weights(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Whole steps of AdamW on one device, of blocks in bf16 (fp32 on a CPU)."""
    dist.init_process_group(
        process_group_backend(device.type), store=HashStore(), rank=0, world_size=1
    )
    try:
        mesh = build_mesh(Layout(dp_replicate=1, dp_shard=1, zero=3), device.type)
        peaks = {way: _peak_bytes(partial(_step, way, args, mesh), device) for way in WAYS}
        step_s = _alternately({way: _step(way, args, mesh) for way in WAYS}, args.pairs, device)
    finally:
        dist.destroy_process_group()
    return {"step_s": step_s, "median_of_pair_ratios": _median_ratio(step_s), "peak_bytes": peaks}


def _step(way: str, args: argparse.Namespace, mesh: Mesh) -> Callable[[], None]:
    torch.manual_seed(0)
    device, on_host = torch.device(mesh.dense.device_type), way == "offloaded"
    blocks = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.matrices)]
    model = nn.Sequential(*blocks)
    precision = MixedPrecisionPolicy(param_dtype=None if device.type == "cpu" else torch.bfloat16)
    groups = Groups(blocks=blocks, output_dtype=None)
    shard_groups(model, mesh, groups, precision=precision, prefetch=1, on_host=on_host)
    moves = StatesOnHost(device, with_weights=True) if on_host else None
    optim = Optim.model_validate({"name": "adamw", "lr": 1e-3, "weight_decay": 0.1})
    optimizer = ShardOptimizer(model, optim, on_host=moves)
    inputs = torch.ones(args.width, args.width, device=device)
    one, none = torch.ones((), device=device), torch.zeros((), device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step(lr=1e-3, divisor=one, skip=none)
        optimizer.synchronize()

    return step


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
        optimizer.synchronize()

    return update


def _peak_bytes(work: Callable[[], Callable[[], None]], device: torch.device) -> int | None:
    """Of making a work and doing it twice; None on a CPU: a process has one peak for all."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    made = work()
    for _ in range(2):
        _seconds(made, device)
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
