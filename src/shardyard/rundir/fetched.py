"""Which files of a run come here from where the nodes wrote them; asked on both sides.

What steers a run (its ledger, what was asked, what is submitted) is written here alone: whoever can
write on the far side may not decide what is started or ended from here.
"""

import re

from shardyard.io.complete import checked_name

_STAYS = frozenset(
    {
        "ledger.jsonl",
        "lease.json",
        "recipe.yaml",
        "launch",
        "requests",
        "submissions",
        "sessions",
        "side",
        "exports",
    }
)
"""First parts of names."""
_CHECKPOINT = re.compile(r"checkpoints/step-\d{8}/[^/]+", re.ASCII)
LINE_FILES = ("events.jsonl", "metrics.jsonl")
"""Merged with what is here already."""


def is_fetched(name: str) -> bool:
    """Whether a file, by its name in the run's folder, is one that `shardyard fetch` brings."""
    try:
        checked_name(name)
    except ValueError:
        return False
    parts = name.split("/")
    if any(part.startswith(".") or part.endswith(".tmp") for part in parts):
        return False  # of a writer that has not finished
    if parts[0] == "checkpoints":
        return _CHECKPOINT.fullmatch(name) is not None
    if parts[0] == "logs" and len(parts) > 1 and parts[1].startswith("job-"):
        return False  # of a local job, steered from here
    return parts[0] not in _STAYS


def checkpoint_of(name: str) -> str | None:
    """Folder of the checkpoint that a file belongs to; None: to none."""
    return name.rpartition("/")[0] if _CHECKPOINT.fullmatch(name) else None
