"""Marked lines: events and metrics of a run inside the output of its node 0.

A run whose folder is out of reach (a claim, a Batch volume) is rebuilt from the scheduler's logs
alone. A marked line is ``@shardyard {"event": {...}}`` or ``@shardyard {"metrics": {...}}``; the
scheduler may put a prefix before it.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import LineWriter, read_lines, write_line

Kind = Literal["event", "metrics"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_MARK = "@shardyard "


@dataclass(frozen=True)
class Marked:
    """One line of events.jsonl or metrics.jsonl, as it came through a log."""

    kind: Kind
    content: dict[str, Any]


def mark(kind: Kind, content: dict[str, Any]) -> str:
    """The line that stands for an object in a log; without a line end."""
    return _MARK + write_line({kind: content})


def parse(line: str) -> Marked | None:
    """What a line of a log stands for; None if it is not marked, or was cut."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if not isinstance(content, dict) or len(content) != 1:
        return None
    for kind in _KINDS:
        if isinstance(content.get(kind), dict):
            return Marked(kind, content[kind])
    return None


def rebuild(lines: Iterable[str], folder: Path) -> int:
    """Add what the lines of a log say to events.jsonl and metrics.jsonl of a run's folder.

    May be called again with the same lines, or with others of the same run, in any portions: what
    the files hold already is passed over.

    Returns:
        How many lines are new.

    Raises:
        StorageError: The folder cannot be written.
    """
    run_dir = RunDir(folder)
    files = {"event": run_dir.events, "metrics": run_dir.metrics}
    known = {kind: {_digest(content) for content in read_lines(files[kind])} for kind in _KINDS}
    new = 0
    with (
        closing(LineWriter(run_dir.events)) as events,
        closing(LineWriter(run_dir.metrics)) as metrics,
    ):
        writers = {"event": events, "metrics": metrics}
        for line in lines:
            marked = parse(line)
            if marked is None:
                continue
            digest = _digest(marked.content)
            if digest not in known[marked.kind]:
                known[marked.kind].add(digest)
                writers[marked.kind].append(marked.content)
                new += 1
    return new


def _digest(content: dict[str, Any]) -> bytes:
    """Stands for a line: of a million of them the lines themselves would take gigabytes."""
    return hashlib.blake2b(write_line(content).encode(), digest_size=8).digest()
