"""What a target lacks, and how a launcher puts it there and takes it away again.

It belongs to the target, not to a run: its ledger stands beside the runs, one for each target.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

from shardyard.launch.base import LaunchRequest
from shardyard.launch.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Part:
    """One missing part of a target."""

    name: str
    """With its version."""
    why: str
    text: str
    """Exactly what is run or sent."""
    command: tuple[str, ...] = ()
    """The argument list of a part that a program installs."""
    objects: tuple[dict[str, Any], ...] = ()
    """The objects of a part that is rendered by us."""
    details: dict[str, str] = field(default_factory=dict)
    """What removes it again."""


@runtime_checkable
class Installs(Protocol):
    """A launcher whose target can be given what it lacks. Methods raise ShardyardError."""

    def target_name(self, request: LaunchRequest) -> str:
        """Of the cluster that a request means."""

    def missing(self, request: LaunchRequest) -> list[Part]:
        """What is not there and can be installed, in the order of installation."""

    def install(self, request: LaunchRequest, part: Part, ledger: Ledger) -> None:
        """Put it there, between its two lines in the ledger."""

    def uninstall(self, request: LaunchRequest, ledger: Ledger) -> list[str]:
        """Remove all that the ledger names, the last first; returns what. Repeatable."""


def target_ledger(runs_dir: Path, launcher: str, target: str) -> Ledger:
    """The ledger of what was installed on a target."""
    return Ledger(runs_dir / f"installed-{launcher}-{quote(target, safe='')}.jsonl")
