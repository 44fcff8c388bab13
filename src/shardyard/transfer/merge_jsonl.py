"""events.jsonl and metrics.jsonl of two homes of a run made one: no line twice, the newest last."""

import hashlib
import heapq
import os
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import FILE_MODE, make_folder
from shardyard.rundir.counted_lines import Start, with_starts
from shardyard.rundir.jsonl import read_lines, write_line


def merge_lines(brought: Path, local_file: Path) -> int:
    """Replace a local line file by both: the nodes' lines, and those that only this side has.

    Events go by their time. Lines of metrics have none: of a step's lines the last one counts,
    so those of the nodes come last.

    Returns:
        Number of lines that are new here.

    Raises:
        StorageError: The folder cannot be written.
    """
    theirs, ours = _digests(brought), _digests(local_file)
    new = len(theirs - ours)
    if not new and local_file.exists():
        return 0  # and the file stays as it is: somebody may be appending to it
    own = _once(local_file, but=theirs)
    both: Iterable[dict[str, Any]] = (
        heapq.merge(own, _once(brought), key=_time)
        if local_file.name == "events.jsonl"
        else chain(own, _once(brought))
    )
    scratch = local_file.with_name(f".{local_file.name}.{os.getpid()}")
    try:
        make_folder(local_file.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(scratch, flags, FILE_MODE), "w", encoding="utf-8") as file:
            for line in both:
                file.write(write_line(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(local_file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise StorageError(
            f"{local_file} cannot be written: {error.strerror}. Check that it is yours and that "
            "there is room (`df -h`), then repeat the command."
        ) from error
    return new


def _once(path: Path, *, but: Set[bytes] = frozenset()) -> Iterator[dict[str, Any]]:
    seen = set(but)
    for start, line in with_starts(read_lines(path)):
        digest = _digest(line, start)
        if digest not in seen:
            seen.add(digest)
            yield line


def _time(event: dict[str, Any]) -> float:
    return float(event.get("t") or 0.0)


def _digests(path: Path) -> set[bytes]:
    return {_digest(line, start) for start, line in with_starts(read_lines(path))}


def _digest(line: dict[str, Any], start: Start | None) -> bytes:
    """Return a digest of a line: a million lines themselves would take gigabytes.

    Args:
        start: Start of an evaluation: a repeated one may have the same values to the bit.
    """
    is_evaluation = "eval" in line and "kind" not in line
    of = {"start": start} if is_evaluation else {}
    return hashlib.blake2b(write_line({**line, **of}).encode(), digest_size=8).digest()
