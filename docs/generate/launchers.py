"""The table of docs/launch.md: what each launcher can do, made from the launchers."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardyard.launchers.base import AsksMany, Capabilities, FindsJobs
from shardyard.launchers.registry import LAUNCHERS

_WORDS = {
    "resizes": "jobs that [`shardyard scale`](verbs/resume.md#scale) changes while they run; "
    "others are drained and submitted again",
    "requeues": "the scheduler starts it again after a lost node or at its time limit",
    "needs_image": "runs in containers of `launch.image`",
    "shares_folder": "the run's folder is on a file system that this machine sees too",
    "is_this_machine": "its nodes are the machine of the command line",
    "secrets": "where [secrets](settings.md#secrets) may be kept",
}
"""Capability -> what a reader is told."""
_POWERS = {
    AsksMany: "[`shardyard runs`](verbs/runs.md) asks for the states of all jobs in one call; else "
    "one call for each",
    FindsJobs: "[`shardyard runs --on`](verbs/runs.md#jobs-whose-folder-is-gone) finds jobs whose "
    "run's folder is gone",
}
"""The same of protocols that it may have beside `Launcher`."""


def table(launchers: Mapping[str, str] = LAUNCHERS) -> str:
    """A Markdown table: a row a capability, a column a launcher."""
    found = {name: _class(place) for name, place in launchers.items()}
    lines = [f"| | {' | '.join(found)} |", f"|---{'|---' * len(found)}|"]
    for field, words in _WORDS.items():
        cells = [_cell(getattr(launcher.capabilities, field)) for launcher in found.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    for power, words in _POWERS.items():
        cells = [_cell(issubclass(launcher, power)) for launcher in found.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    launcher = getattr(import_module(module), name)
    assert isinstance(launcher.capabilities, Capabilities)
    return launcher


def _cell(value: bool | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{kind}`" for kind in value) or "none"
    return "yes" if value else "no"
