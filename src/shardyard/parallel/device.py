"""Kinds of accelerators: the one place that knows them, which every other module asks.

An accelerator that torch knows, or that its vendor's package adds to torch, needs no code
here. torch names it, and its package says what it computes and communicates with.

Run as a program, prints this machine's accelerators as one line of JSON, for
`hardware.machine.probe`.
"""

import importlib
import json
import os
import resource
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.control_groups import memory_limit
from shardyard.errors import RequestError

_HAS_COLLECTIVES = {"hpu": "habana_frameworks.torch.distributed.hccl"}
"""Kind -> the vendor's module that tells torch of its process groups when it is imported."""

COLLECTIVE_KERNELS = ("nccl", "rccl", "hccl", "xccl")
"""Parts of the names of kernels that exchange data between devices."""


def available_device() -> str:
    """Kind of this machine's accelerator, or cpu."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def process_group_backend(device: str) -> str:
    """Name of the process-group backend for collectives of this kind of device: torch's own.

    Raises:
        RequestError: The kind, or a backend for it, is not known to torch.
    """
    try:
        if device in _HAS_COLLECTIVES:
            importlib.import_module(_HAS_COLLECTIVES[device])
        return str(dist.get_default_backend_for_device(device))
    except (ImportError, RuntimeError, ValueError) as error:  # no package, no device, no backend
        raise RequestError(
            f"cluster.device={device}: torch knows no process groups for it ({error}). Collectives "
            "would have no way to run. Install the vendor's package for this torch, which adds "
            "them, or use another cluster.device."
        ) from error


def select_device(device: str, local_rank: int) -> torch.device:
    """Make device ``local_rank`` this process's own and return it."""
    if device == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device, local_rank)


def set_deterministic(device: torch.device, *, on: bool) -> None:
    """Let equal inputs give equal bits, in every process; or no longer.

    On a CPU this needs one thread: kernels cut their work, and so their sums, by the number of
    threads. On an accelerator it uses torch's deterministic kernels; an operator that has none
    raises.
    """
    torch.use_deterministic_algorithms(on)
    # memory that nobody has written need not be filled: nothing reads it
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    if not on:
        return
    if device.type == "cpu":
        torch.set_num_threads(1)
    elif device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
        torch.backends.cudnn.benchmark = False


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work given so far."""
    if device.type != "cpu":
        _call(device, "synchronize")


def synchronize_stream(device: torch.device) -> None:
    """Wait until the device has done what was queued on this thread's stream."""
    if device.type != "cpu":
        _call(device, "current_stream").synchronize()


def pin(content: Tensor, devices: Iterable[torch.device]) -> None:
    """Let a device copy into host memory of our own without waiting for each tensor.

    Works in any thread; has no effect where the kind of device does not support it.
    """
    for device in devices:
        if device.type == "cuda" and content.numel():
            torch.accelerator.set_device_index(device)  # a thread begins at the first one
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(content.data_ptr(), content.numel(), 0))


def unpin(content: Tensor, devices: Iterable[torch.device]) -> None:
    """Take back what ``pin`` did, before the memory is unmapped."""
    for device in devices:
        if device.type == "cuda" and content.numel():
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostUnregister(content.data_ptr()))


def peak_memory_bytes(device: torch.device) -> int:
    """Highest allocated bytes of this process: on the device, or resident in the host for cpu."""
    if device.type != "cpu":
        return int(_call(device, "max_memory_allocated"))
    return _of_process("VmHWM")


def allocated_memory_bytes(device: torch.device) -> int:
    """Bytes of tensors on the device now; for cpu what this process has resident."""
    return _of_process("VmRSS") if device.type == "cpu" else int(_call(device, "memory_allocated"))


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that could still be allocated; None where the device does not say."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return max(0, limit - _of_process("VmSize"))
    there = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    group = memory_limit()
    used = None if group is None else group.used_bytes
    return there if group is None or used is None else min(there, max(0, group.bytes - used))


def reserved_memory_bytes(device: torch.device) -> int | None:
    """Return the highest bytes that the device's allocator held. None for cpu: no count."""
    return None if device.type == "cpu" else int(_call(device, "max_memory_reserved"))


def _of_process(name: str) -> int:
    return _kilobytes(Path("/proc/self/status"), name)


def _kilobytes(table: Path, name: str) -> int:
    """Bytes of a line ``name: 1234 kB``; 0: there is none."""
    for line in table.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _call(device: torch.device, function: str) -> Any:
    """Query the device: by its own module's function, or torch's for all kinds.

    Its own comes first: torch 2.11 answers for a device that is written in Python, without a
    wait.
    """
    module = torch.get_device_module(device)
    owner = module if hasattr(module, function) else torch.accelerator
    return getattr(owner, function)(device)


class CopyQueue:
    """Copies between device and host that overlap compute; on a CPU plain copies, over at once.

    Marks are events: None on a CPU, where there is no wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def to_host(self, source: Tensor) -> Tensor:
        """Begin to copy what is computed by now; keep the source alive and as it is until then."""
        pinned = self._stream is not None
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
        return self._begin(copy, source)

    def into_host(self, target: Tensor, source: Tensor) -> None:
        """Copy like ``to_host``, into existing memory; unless it is pinned, the host waits."""
        self._begin(target, source)

    def to_device(self, source: Tensor) -> Tensor:
        """Begin to copy into new memory of the device; do not free it before the copy is over."""
        return self._begin(torch.empty_like(source, device=self._device), source)

    def mark(self) -> torch.Event | None:
        """An event that is over when all copies begun so far are."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.Event | None) -> None:
        """Let compute that is given from now on wait for a mark; the host does not."""
        if mark is not None:
            torch.accelerator.current_stream(self._device).wait_event(mark)

    def _begin(self, copy: Tensor, source: Tensor) -> Tensor:
        if self._stream is None:
            return copy.copy_(source)
        # what wrote the source, or used the memory of the copy before, comes first
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            return copy.copy_(source, non_blocking=True)


def _has_fp8(device: str) -> bool:
    """Whether matrix units multiply fp8: NVIDIA's from capability 8.9, AMD's from CDNA 3."""
    if device != "cuda":
        return False
    if torch.version.hip:
        architecture = str(torch.cuda.get_device_properties(0).gcnArchName)
        return architecture.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(0) >= (8, 9)


def _has_bf16(device: str) -> bool:
    """Whether bf16 numbers are multiplied and not emulated: by NVIDIA's from capability 8.0."""
    return device != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _describe() -> dict[str, str | int]:
    """Describe the accelerators, or say that there are none: cpu."""
    device = available_device()
    if device == "cpu":
        return {"device": device}
    module = torch.get_device_module(device)
    return {
        "device": device,
        "name": str(module.get_device_name(0)),
        "count": torch.accelerator.device_count(),
        "memory_bytes": _device_memory_bytes(module),
        "has_fp8": _has_fp8(device),
        "has_bf16": _has_bf16(device),
    }


def total_memory_bytes(device: torch.device) -> int:
    """All memory of an accelerator."""
    return _device_memory_bytes(torch.get_device_module(device))


def _device_memory_bytes(module: Any) -> int:
    properties = module.get_device_properties(0) if hasattr(module, "get_device_properties") else 0
    if hasattr(properties, "total_memory"):
        return int(properties.total_memory)
    _free, total = module.mem_get_info(0)
    return int(total)


def adds_to_fp32(device: torch.device) -> bool:
    """Check whether a product of 16-bit matrices can be added to an fp32 one.

    Only CUDA has ``aten::addmm.dtype_out``, also under ROCm (torch 2.11 to 2.13).
    """
    return device.type == "cuda"


def has_triton(device: torch.device) -> bool:
    """Whether torch brings Triton for such devices."""
    return device.type == "cuda"


def enable_sdpa_kernels(kernels: Collection[str] | None) -> None:
    """Leave torch these kernels of its attention, of the whole process; None: all it has."""
    switches = {
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    for name, switch in switches.items():
        switch(kernels is None or name in kernels)


if __name__ == "__main__":
    print(json.dumps(_describe()))
