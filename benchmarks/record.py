"""What every result file says about itself: when, from which code, on what, by which command."""

import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from shardyard.config.versions import package_versions
from shardyard.hardware.machine import Machine, probe
from shardyard.io.files import write_json
from shardyard.rundir.manifest import git_state

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, content: dict[str, Any], out: Path | None = None) -> None:
    """Write a result with its head, and say where it is.

    Args:
        name: Of the measurement; part of the file's name.
        out: The file; None: ``results/<device>/<name>-<date>.json``.
    """
    machine = probe()
    path = out or result_file(name, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**about(machine), **content})
    print(f"raw results: {path}", file=sys.stderr)


def about(machine: Machine) -> dict[str, Any]:
    """The head of a result file; it names no host and no folder."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", _program(), *sys.argv[1:]]),
        "git": git_state(Path(__file__).parent),
        "hardware": {
            "device": machine.device,
            "name": machine.name,
            "count": machine.count,
            "memory_bytes": machine.memory_bytes,
            "cores": machine.cores,
        },
        "load_average": list(os.getloadavg()),
        "versions": {"python": platform.python_version(), **package_versions()},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("OMP_", "NCCL_", "PYTORCH_", "TORCH_"))
        },
    }


def result_file(name: str, machine: Machine, folder: Path = RESULTS) -> Path:
    """``<folder>/<device>/<name>-<date>.json``; a CPU is named by the number of its cores."""
    device = f"cpu-{machine.cores}core" if machine.device == "cpu" else machine.name
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / slug / f"{name}-{time.strftime('%Y%m%d', time.gmtime())}.json"


def _program() -> str:
    """The module that was started, as ``python -m`` takes it."""
    spec = sys.modules["__main__"].__spec__
    return "?" if spec is None else spec.name
