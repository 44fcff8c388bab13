"""Questions to git about any folder: its configuration starts no programs.

The folder may be another user's. A repository's own configuration can name programs that
reading commands start: core.fsmonitor, hooks, filters of files, a remote that completes a
partial clone.
"""

import os
import subprocess
from pathlib import Path

_OFF = {"core.fsmonitor": "false", "core.hooksPath": os.devnull, "core.untrackedCache": "false"}


def git(folder: Path, *arguments: str, timeout_s: float = 10) -> str | None:
    """Output of a git command that only reads; None: no git, no repository or no answer."""
    filters = _own_filters(folder, timeout_s)
    if filters is None:
        return None
    return _run(folder, arguments, _OFF | filters, timeout_s)


def _own_filters(folder: Path, timeout_s: float) -> dict[str, str] | None:
    """Settings that switch off the filters which the repository itself configures."""
    wanted = ("config", "--show-scope", "--null", "--name-only", "--list")
    answer = _run(folder, wanted, _OFF, timeout_s)
    if answer is None:
        return None
    words = answer.split("\0")
    filters: dict[str, str] = {}
    for scope, key in zip(words[::2], words[1::2], strict=False):
        name = key.rpartition(".")[0]
        if scope in {"local", "worktree"} and name.startswith("filter."):
            filters |= {f"{name}.clean": "", f"{name}.process": "", f"{name}.required": "false"}
    return filters


def _run(
    folder: Path, arguments: tuple[str, ...], settings: dict[str, str], timeout_s: float
) -> str | None:
    environ = {
        **os.environ,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    for number, (key, value) in enumerate(settings.items()):
        environ |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=environ,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
