"""What every result file says about itself: when, from which code, on what, by which command."""

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardyard.config.compatibility import package_versions
from shardyard.hardware.machine import Machine
from shardyard.rundir.layout import write_json
from shardyard.rundir.manifest import git_state

RESULTS = Path(__file__).parent / "results"


def about(module: str, machine: Machine, arguments: Sequence[str]) -> dict[str, Any]:
    """The head of a result file.

    Args:
        module: The program, as ``python -m`` takes it.
        arguments: Its command line, without the program.
    """
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", module, *arguments]),
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
    """``results/<device>/<name>-<date>.json``; CPU results are named by the number of cores."""
    device = f"cpu-{machine.cores}core" if machine.device == "cpu" else _slug(machine.name)
    return folder / device / f"{name}-{time.strftime('%Y%m%d', time.gmtime())}.json"


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result file at once and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    print(f"raw results: {path}", file=sys.stderr)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
