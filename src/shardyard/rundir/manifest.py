"""attempts/<n>/manifest.json: with what, where and from which command an attempt was started."""

import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardyard import __version__
from shardyard.config.compatibility import package_versions
from shardyard.config.credentials import redact
from shardyard.files import write_json
from shardyard.hardware.machine import Machine
from shardyard.rundir.layout import VERSION, RunDir


def write_manifest(
    run_dir: RunDir,
    attempt: int,
    *,
    command: Sequence[str],
    machine: Machine | None,
    plug_ins: Sequence[Mapping[str, str]] = (),
    started_at: float | None = None,
) -> None:
    """Write attempts/<n>/manifest.json at once.

    Args:
        command: The command line; an argument that holds a credential is replaced.
        machine: The machine that was probed, if one was.
        plug_ins: What packages add that the attempt uses, as ``PlugIn.to_json`` has it.
        started_at: Unix seconds; None: now.

    Raises:
        StorageError: The run folder cannot be written.
    """
    content = {
        "contract_version": VERSION,
        "attempt": attempt,
        "shardyard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "plug_ins": [dict(plug_in) for plug_in in plug_ins],
        "git": git_state(Path.cwd()),
        "command": [redact(argument) for argument in command],
        "executable": sys.executable,
        "working_dir": str(Path.cwd()),
        "hostname": socket.gethostname(),
        "machine": None if machine is None else asdict(machine),
        "started_at": time.time() if started_at is None else started_at,
    }
    write_json(run_dir.manifest(attempt), content)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the work tree that holds a folder, and whether files differ from it; else None."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "is_dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None where there is no git, no repository or no answer."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
