"""The table of docs/launch.md: what each launcher can do, made from their ``Capabilities``."""

from collections.abc import Mapping
from importlib import import_module

from shardyard.launch.base import LAUNCHERS, Capabilities

_WORDS = {
    "resizes": "jobs that [`shardyard scale`](verbs/scale.md) changes while they run; any other is "
    "drained and submitted again",
    "requeues": "the scheduler starts it again after a lost node or at its time limit",
    "needs_image": "runs in containers of `launch.image`",
    "shares_folder": "the run's folder is on a file system that this machine sees too",
    "is_this_machine": "its nodes are the machine of the command line",
    "secrets": "where [secrets](settings.md#secrets) may be kept",
}
"""Capability -> what a reader is told."""


def table(launchers: Mapping[str, str] = LAUNCHERS) -> str:
    """A Markdown table: a row a capability, a column a launcher."""
    found = {name: _capabilities(place) for name, place in launchers.items()}
    lines = [f"| | {' | '.join(found)} |", f"|---{'|---' * len(found)}|"]
    for field, words in _WORDS.items():
        cells = [_cell(getattr(capabilities, field)) for capabilities in found.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _capabilities(place: str) -> Capabilities:
    module, _, name = place.partition(":")
    capabilities = getattr(import_module(module), name).capabilities
    assert isinstance(capabilities, Capabilities)
    return capabilities


def _cell(value: bool | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{kind}`" for kind in value) or "none"
    return "yes" if value else "no"
