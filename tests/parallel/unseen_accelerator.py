"""An accelerator that nobody has seen: its package registers a device and collectives with torch.

Import it in a process of its own: torch takes one such registration and keeps it. The device has no
kernels, so nothing is computed on it; what it is asked is written down.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KIND = "acme"
asked: list[str] = []


class AcmeModule:
    """What `torch.acme` is; it has not joined torch.accelerator's memory statistics."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 4

    def get_device_name(self, index: int) -> str:
        return f"Acme One #{index}"

    def mem_get_info(self, _index: int) -> tuple[int, int]:
        return 5 * 2**30, 6 * 2**30

    def synchronize(self, device: torch.device) -> None:
        asked.append(f"synchronize {device}")

    def max_memory_allocated(self, _device: torch.device) -> int:
        return 3 * 2**30

    def max_memory_reserved(self, _device: torch.device) -> int:
        return 4 * 2**30


def _open_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Its collectives, run by gloo in host memory."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


_setup_privateuseone_for_python_backend(KIND, backend_module=AcmeModule())
if "--without-collectives" not in sys.argv:
    dist.Backend.register_backend("acmecl", _open_group, devices=[KIND])
