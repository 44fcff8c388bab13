"""attempts/<n>/manifest.json: with what, where and from which command an attempt was started."""

import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardyard import __version__
from shardyard.config.secrets import redact
from shardyard.config.versions import package_versions
from shardyard.git import git
from shardyard.io.files import write_json
from shardyard.rundir.layout import VERSION, RunDir


def write_manifest(
    run_dir: RunDir,
    attempt: int,
    *,
    command: Sequence[str],
    machine: Mapping[str, Any] | None,
    plug_ins: Sequence[Mapping[str, str]] = (),
    started_at: float | None = None,
) -> None:
    """Write attempts/<n>/manifest.json at once.

    Args:
        command: The command line; an argument that holds a credential is replaced.
        machine: Facts about the machine that was probed, if one was.
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
        "machine": None if machine is None else dict(machine),
        "started_at": time.time() if started_at is None else started_at,
    }
    write_json(run_dir.manifest(attempt), content)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the work tree that holds a folder, and whether files differ from it; else None."""
    commit = git(folder, "rev-parse", "HEAD")
    changes = git(
        folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"
    )
    if commit is None or changes is None:
        return None
    return {"commit": commit.strip(), "is_dirty": bool(changes.strip())}
