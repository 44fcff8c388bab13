"""The devices of one machine, as a value."""

import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.control_groups import usable_cores, usable_memory_bytes
from shardyard.errors import RequestError
from shardyard.io.files import parse_json
from shardyard.own_processes import python_program


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has to train with."""

    device: str
    """torch's name of its kind: cpu, cuda (also ROCm), xpu, hpu, or a vendor's own name."""
    name: str
    """The vendor's name of one device, or the CPU's."""
    count: int
    """Devices; for cpu: 1, as CPU processes are a choice and not a fact."""
    memory_bytes: int
    """Memory of one device; for cpu: of the machine, within the limit of its container."""
    cores: int
    """CPU cores of the machine, within the limit of its container."""
    hostname: str
    has_fp8: bool = False
    """Whether torchao's fp8 products run on its devices."""
    has_bf16: bool = True
    """Whether its devices multiply bf16 numbers: NVIDIA's from capability 8.0 on."""


def local_machine(device: str) -> Machine:
    """Describe this machine as a recipe uses it.

    Args:
        device: ``cluster.device``. For cpu no accelerator counts, and torch is not imported, which
            takes three seconds.

    Raises:
        RequestError: torch cannot be imported, or its accelerator does not answer.
    """
    return cpu_machine() if device == "cpu" else probe()


def cpu_machine() -> Machine:
    """Describe this machine without its accelerators."""
    return Machine(
        device="cpu",
        name=_cpu_name(),
        count=1,
        memory_bytes=usable_memory_bytes(),
        cores=usable_cores(),
        hostname=socket.gethostname(),
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# What devices this machine has, asked in a process of its own.
#
# The question needs torch, which the control half never imports; the answer is one line of JSON.

_PROGRAM = python_program("shardyard.parallel.device")
_TIMEOUT_S = 180.0
"""A cold file system can take a minute to import torch."""


def probe(program: Sequence[str] = _PROGRAM) -> Machine:
    """Describe this machine's devices, as `python -m shardyard.parallel.device` prints them.

    Args:
        program: What prints the description.

    Raises:
        RequestError: torch cannot be imported, or its accelerator does not answer.
    """
    try:
        answer = subprocess.run(
            program, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return replace(cpu_machine(), **_accelerators(answer.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise _failed(f"gave no answer in {_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no output"]
        raise _failed(f"failed with exit code {error.returncode}: {lines[-1]}") from error
    except (ValueError, TypeError, IndexError) as error:
        raise _failed("did not answer with a description of devices") from error


def _accelerators(line: str) -> dict[str, Any]:
    described = parse_json(line)
    if not isinstance(described, dict) or "device" not in described:
        raise ValueError(f"no device in {described}")
    return described


def _failed(what: str) -> RequestError:
    return RequestError(
        f"the probe of this machine's devices {what}. Training needs a working torch and device "
        f"driver. Try it yourself: `{sys.executable} -m shardyard.parallel.device`."
    )


# Which of a node's NVIDIA devices a process may use, as its environment says.

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def named_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Numbers or UUIDs, in the order in which the process sees them; None: it sees all."""
    named = environ.get(_VARIABLE)
    if named is None:
        return None
    return [name for part in named.split(",") if (name := part.strip())]
