"""Marked lines: events and metrics of a run inside the output of its node 0, and answers.

A run whose folder is out of reach (a claim, a Batch volume) is rebuilt only from the
scheduler's logs. A marked line is ``@shardyard:NONCE {"event": {...}}`` or
``... {"metrics": {...}}``; the scheduler may put a prefix before it. A side job prints its
result as ``{"answer": {...}}``, which is in neither file.

The nonce is new with each submission. The launcher keeps it with the job in the ledger. The
nodes get it in a variable that no process of the training inherits. So a line of text that
a training prints, from its data or a library, cannot pass for an event. It does not hold
against the user's own code, which could read the variable of its parent process; that code
is trusted, as it may write events.jsonl anyway. Jobs of before there was a nonce have none
in the ledger, and their marks are ``@shardyard {...}``.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shardyard.io.files import parse_json
from shardyard.rundir.counted_lines import Start, start_of, with_starts
from shardyard.rundir.jsonl import LineWriter, read_lines, write_line
from shardyard.rundir.layout import RunDir

Kind = Literal["event", "metrics", "answer"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_FILED: tuple[Kind, ...] = ("event", "metrics")
NONCE_VARIABLE = "SHARDYARD_MARK"
"""Tells node 0 what to mark its lines with."""
NONCE_DETAIL = "mark"
"""Detail of a job in the ledger."""


@dataclass(frozen=True)
class MarkedLine:
    """One line of events.jsonl or metrics.jsonl, or an answer, as it came through a log."""

    kind: Kind
    content: dict[str, Any]


def new_nonce() -> str:
    """Return a nonce that cannot be guessed."""
    return secrets.token_hex(8)


def mark(kind: Kind, content: dict[str, Any], *, nonce: str = "") -> str:
    """Return the log line of an object; without a line end."""
    return _prefix(nonce) + write_line({kind: content})


def parse(line: str, *, nonce: str = "") -> MarkedLine | None:
    """Return the content of a log line; None if it lacks the nonce's mark, or was cut."""
    _, found, text = line.partition(_prefix(nonce))
    if not found:
        return None
    try:
        content = parse_json(text)
    except ValueError:
        return None
    if not isinstance(content, dict) or len(content) != 1:
        return None
    for kind in _KINDS:
        if isinstance(content.get(kind), dict):
            return MarkedLine(kind, content[kind])
    return None


def _prefix(nonce: str) -> str:
    return f"@shardyard:{nonce} " if nonce else "@shardyard "


def rebuild(lines: Iterable[str], folder: Path, *, nonce: str = "") -> int:
    """Add what the lines of a log say to events.jsonl and metrics.jsonl of a run's folder.

    May be called again with the same lines, or with others of the same run, in any portions: what
    the files hold already is passed over.

    Returns:
        How many lines are new.

    Raises:
        StorageError: The folder cannot be written.
    """
    run_dir = RunDir(folder)
    files: dict[Kind, Path] = {"event": run_dir.events, "metrics": run_dir.metrics}
    known = {kind: set(_digests(read_lines(files[kind]))) for kind in _FILED}
    start: Start | None = None
    new = 0
    with (
        closing(LineWriter(run_dir.events)) as events,
        closing(LineWriter(run_dir.metrics)) as metrics,
    ):
        writers: dict[Kind, LineWriter] = {"event": events, "metrics": metrics}
        for line in lines:
            marked = parse(line, nonce=nonce)
            if marked is None or marked.kind not in _FILED:
                continue
            if marked.kind == "metrics" and "eval" not in marked.content:
                start = start_of(marked.content)
            # an evaluation that is done again may say the same to the bit
            digest = _digest(marked.content, start)
            if digest not in known[marked.kind]:
                # Both digests: the next portion may come without the step that tells which start
                # this is.
                known[marked.kind] |= {digest, _digest(marked.content)}
                writers[marked.kind].append(marked.content)
                new += 1
    return new


def _digests(lines: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for start, line in with_starts(lines):
        yield _digest(line)
        yield _digest(line, start)


def _digest(content: dict[str, Any], start: Start | None = None) -> bytes:
    """Return a digest of a line: a million lines themselves would take gigabytes.

    Args:
        start: Start that an evaluation is of, which its line does not say; None: not known.
    """
    is_evaluation = "eval" in content and "kind" not in content
    of = {"start": start} if is_evaluation and start is not None else {}
    # At 8 bytes two of a million lines get the same digest with a chance of 3 in 100 million.
    return hashlib.blake2b(write_line({**content, **of}).encode(), digest_size=8).digest()
