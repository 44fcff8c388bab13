"""Where one step's time goes on the device: the table to read where a step is too slow."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardyard.parallel.device import synchronize

_ROWS = 40


def kernel_table(step: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """Take one step; the kernels (on a CPU: operators) that took most of it, longest first."""
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
            rows.append({"name": event.key[:160], "calls": event.count, "ms": micros / 1e3})
    return sorted(rows, key=lambda row: -row["ms"])[:_ROWS]
