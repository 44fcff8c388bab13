"""The one place that knows kinds of accelerators; every other module asks here.

Run as a program, prints this machine's devices as one line of JSON (`hardware.machine.Machine`).
"""

import json
import os
import platform
import socket
from pathlib import Path

import torch

_PROCESS_GROUP_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}


def available_device() -> str:
    """Kind of this machine's accelerator, or cpu."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def process_group_backend(device: str) -> str:
    """Name of the process-group backend for collectives of this kind of device."""
    return _PROCESS_GROUP_BACKENDS[device]


def select_device(device: str, local_rank: int) -> torch.device:
    """Make device ``local_rank`` this process's own and return it."""
    if device == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device, local_rank)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work given so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Highest allocated bytes of this process: on the device, or resident in the host for cpu."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def reserved_memory_bytes(device: torch.device) -> int | None:
    """Highest bytes that the device's allocator held; None for cpu, where it says nothing."""
    return None if device.type == "cpu" else int(torch.accelerator.max_memory_reserved(device))


def _describe() -> dict[str, str | int]:
    device = available_device()
    if device == "cpu":
        name, count, memory = _cpu_name(), 1, _host_memory_bytes()
    else:
        module = torch.get_device_module(device)
        name, count = str(module.get_device_name(0)), torch.accelerator.device_count()
        memory = int(module.get_device_properties(0).total_memory)
    return {
        "device": device,
        "name": name,
        "count": count,
        "memory_bytes": memory,
        "cores": len(os.sched_getaffinity(0)),
        "hostname": socket.gethostname(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    print(json.dumps(_describe()))
