"""Where one step's time goes on the device: the table to read where a step is too slow."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardyard.parallel.device import synchronize

_ROWS = 40
GAPS = "gaps"
CAUSES: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "scaled_dot_product"),
    "loss": ("softmax", "nll", "cross_entropy"),
    "optimizer": ("multi_tensor_apply", "adam", "foreach", "lpnorm"),
    "GEMM": (
        "gemm", "nvjet", "cutlass", "_mm", "::mm", "::bmm", "::addmm", "conv", "wgrad", "dgrad",
    ),
    "copies": ("memcpy", "memset", "copy_", "copy_kernel", "split_with_sizes", "nccl", "c10d::"),
}  # fmt: skip
"""Cause -> parts of the names of its kernels (on a CPU: operators); the first that fits counts.
What is left is pointwise; where no kernel runs, gaps."""
POINTWISE = "pointwise"


def kernel_profile(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Take one step apart.

    Returns:
        ``kernels``: those that took most of it, longest first; ``causes``: milliseconds by
        ``CAUSES``, pointwise and gaps; ``step_ms``: from its first kernel to the end of its last.
    """
    on_device = device.type != "cpu"
    activities = [ProfilerActivity.CPU]
    if on_device:
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    synchronize(device)
    with profile(activities=activities, acc_events=True) as seen:
        step()
        synchronize(device)
    rows = []
    for event in seen.key_averages():
        is_kernel = event.device_type.name != "CPU"
        if is_kernel == on_device:
            micros = event.self_device_time_total if on_device else event.self_cpu_time_total
            name, cause = event.key[:160], cause_of(event.key)
            rows.append({"name": name, "cause": cause, "calls": event.count, "ms": micros / 1e3})
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if (event.device_type.name != "CPU") == on_device
    ]
    step_ms, busy_ms = covered_ms(spans)
    rows.sort(key=lambda row: -row["ms"])
    causes = by_cause(rows)
    causes[GAPS] = step_ms - busy_ms
    return {"kernels": rows[:_ROWS], "causes": causes, "step_ms": step_ms}


def cause_of(name: str) -> str:
    """Which cause a kernel belongs to."""
    lower = name.lower()
    found = (cause for cause, parts in CAUSES.items() if any(part in lower for part in parts))
    return next(found, POINTWISE)


def by_cause(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each cause; every cause is there."""
    causes = dict.fromkeys((*CAUSES, POINTWISE), 0.0)
    for row in rows:
        causes[row["cause"]] += row["ms"]
    return causes


def covered_ms(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """From the first begin to the last end, and what of it any span covers; spans are in us."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    busy, until = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return (until - ordered[0][0]) / 1e3, busy / 1e3
