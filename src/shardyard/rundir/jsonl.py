"""The two line files of a run, events.jsonl and metrics.jsonl: their keys, writers and readers.

A line is appended by one write call to a file opened for appending, so that the agent of node 0 and
rank 0, which run on the same node, never mix theirs. A kill can tear the last line: readers pass
over a line that is not of the form that writers give it, writers begin on a new one.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import FILE_MODE, break_links, make_folder, open_plain
from shardyard.rundir.counted_lines import (
    BEGINS,
    CountedLines,
    Start,
    begins,
    counted,
    counted_backwards,
)

EXPERT_LOAD = "expert_load"
ROUTER_KEYS = (EXPERT_LOAD, "router_aux_loss", "router_z_loss")
"""Visits of the busiest expert of any block as a multiple of the mean, and the two losses before
their weights; null for a model without experts."""

METRIC_KEYS = (
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "loss_scale",
    "lr",
    "tokens",
    "targets",
    "samples",
    "step_time_s",
    "data_wait_s",
    "checkpoint_blocked_s",
    "tokens_per_s",
    "samples_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_memory_bytes",
    *ROUTER_KEYS,
    "attempt",
    "generation",
    "world_size",
    "phase",
)
"""Keys of a step's line, all present; null where one has no meaning."""


EVENT_KINDS = (
    "run_started",
    "attempt_started",
    "rendezvous",
    "phase_started",
    "data_ready",
    "reference_started",
    "reference_ready",
    "model_ready",
    "checkpoint_loaded",
    "snapshot_restored",
    "snapshot_interval",
    "checkpoint_interval",
    "snapshot_not_copied",
    "snapshots_left_out",
    "first_step",
    "checkpoint_started",
    "checkpoint_durable",
    "checkpoint_abandoned",
    "checkpoint_uploaded",
    "checkpoint_not_uploaded",
    "evaluated",
    "generated",
    "worker_lost",
    "worker_hung",
    "node_lost",
    "node_left_out",
    "straggler",
    "slow_link",
    "paused",
    "data_limit",
    "callback_failed",
    "router_collapsed",
    "profiled",
    "profile_abandoned",
    "device_problem",
    "device_well",
    "program_error",
    "store_moved",
    "network",
    "resized",
    "draining",
    "spent",
    "stalled",
    "stopping",
    "tracked",
    "not_sent",
    "attempt_ended",
    "run_finished",
)

LOSSES = ("worker_lost", "worker_hung", "node_lost")
"""Kinds of events that end a generation."""
LOST_WITH_MEMORY = ("node_lost",)
"""Kinds among ``LOSSES`` after which snapshots in memory may be gone."""
LOST_WITHOUT_MEMORY = ("worker_lost", "worker_hung")

_EVENT_NUMBERS = (
    "t", "attempt", "generation", "step", "seconds", "usual_s", "exit_code", "usd", "usd_per_hour"
)  # fmt: skip
"""Keys of events that are counted with."""

_EVENTS = "events.jsonl"
_BLOCK_BYTES = 16 * 2**10


class LineWriter:
    """Appends JSON lines to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_folder(path.parent)
            break_links(path)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, FILE_MODE)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")  # end the line that a kill tore
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}.") from error

    def append(self, content: dict[str, Any]) -> None:
        """Append one object as one line. Numbers that JSON lacks (nan, inf) become null.

        Raises:
            StorageError: The file system rejected the write.
        """
        data = write_line(content).encode() + b"\n"
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError(28, "no space left on device")
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}. Free some space and resume."
            ) from error

    def close(self) -> None:
        os.close(self._descriptor)


def write_line(content: dict[str, Any]) -> str:
    """One object as one line of JSON; numbers that JSON lacks (nan, inf) become null."""
    return json.dumps(json_value(content), allow_nan=False)


class EventWriter:
    """Appends events, each with its time, attempt and generation."""

    def __init__(self, path: Path, *, attempt: int, generation: int) -> None:
        self._lines = LineWriter(path)
        self.attempt = attempt
        self.generation = generation

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event of a kind in ``EVENT_KINDS``."""
        assert kind in EVENT_KINDS, kind
        head = {"t": time.time(), "kind": kind}
        place = {"attempt": self.attempt, "generation": self.generation}
        self._lines.append({**head, **place, **fields})

    def close(self) -> None:
        self._lines.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a line file; a missing file has none, a torn line is passed over.

    Raises:
        StorageError: It is no plain file, or cannot be read.
    """
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file:
        for line in file:  # one at a time: a long run has a gigabyte of them
            if content := _object(line):
                yield content


def read_lines_backwards(
    path: Path, *, with_any: Sequence[str] = (), most_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """Read like ``read_lines``, the last line first, and only as much of the file as needed.

    Args:
        with_any: Pass over lines that hold none of these texts, without parsing them.
        most_bytes: Look back this far at most; None: to the beginning.

    Raises:
        StorageError: The path is no plain file, or cannot be read.
    """
    wanted = [text.encode() for text in with_any]
    try:
        # no file object: it costs more than what is read, and a list of runs opens thousands
        file = open_plain(path)
    except FileNotFoundError:
        return
    try:
        place = os.fstat(file).st_size
        least = 0 if most_bytes is None else max(0, place - most_bytes)
        begun = b""  # of a line whose beginning is not read yet
        while place > least:
            size = min(_BLOCK_BYTES, place)
            place -= size
            block = os.pread(file, size, place) + begun
            if wanted and not any(text in block for text in wanted):
                begun = block.partition(b"\n")[0]
                continue
            begun, *lines = block.split(b"\n")
            for line in reversed(lines):
                if wanted and not any(text in line for text in wanted):
                    continue
                if content := _object(line):
                    yield content
        if place == 0 and (content := _object(begun)):
            yield content
    finally:
        os.close(file)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = _DECODER.decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and _is_formed(content) else None


_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
"""Reads NaN and Infinity, which other writers leave, as null, as ours write them."""

_NUMBERS = frozenset({int, float, type(None)})
"""Types of a number, and of null for one that has no meaning; a bool is none."""


def _is_formed(line: dict[str, Any]) -> bool:
    """Whether a line can be counted with: one odd line may not hide a run, or a list of runs."""
    # sets of types and no loop: a list of ten thousand runs asks it of eighty thousand lines
    if "kind" in line:
        is_named = isinstance(line["kind"], str)
        return is_named and _NUMBERS.issuperset(map(type, map(line.get, _EVENT_NUMBERS)))
    if type(line.get("step")) is not int:
        return False
    groups = [line.get("eval", {})]
    if "eval" in line:
        sources = line.get("eval_sources", {})
        groups += sources.values() if isinstance(sources, dict) else [sources]
    if not {dict}.issuperset(map(type, groups)):
        return False
    numbers = chain(map(line.get, METRIC_KEYS), *(scores.values() for scores in groups))
    return _NUMBERS.issuperset(map(type, numbers))


def read_counted(path: Path) -> CountedLines:
    """Return lines of metrics.jsonl that count, and those that its events show to be lost."""
    return counted(read_lines(path), read_lines(path.with_name(_EVENTS)))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Lines of steps in metrics.jsonl that count, in order."""
    return list(read_counted(path).steps)


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Lines of evaluations in metrics.jsonl that count, in order."""
    return list(read_counted(path).evaluations)


def scores_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of an evaluation's line, those of other datasets as ``code/loss``."""
    of_sets = {
        f"{part}/{name}": value
        for part, scores in line.get("eval_sources", {}).items()
        for name, value in scores.items()
    }
    return {**line["eval"], **of_sets}


def latest_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yield lines of the steps that count, the newest first, reading from the end of the file."""
    lines = counted_backwards(read_lines_backwards(path), read_begins(path))
    return (line for line in lines if "eval" not in line)


def latest_evaluation(path: Path, *, most_bytes: int | None = None) -> dict[str, Any] | None:
    """The line of the newest evaluation that counts, reading from the end of the file.

    Args:
        most_bytes: Look no further back than so far; None: to the beginning.
    """
    told = read_lines_backwards(path, with_any=('"eval"',), most_bytes=most_bytes)
    if next((line for line in told if "eval" in line), None) is None:
        return None  # most lines are not parsed: a list of runs asks thousands of files
    lines = counted_backwards(read_lines_backwards(path, most_bytes=most_bytes), read_begins(path))
    return next((line for line in lines if "eval" in line), None)


def read_begins(path: Path) -> Iterator[tuple[Start, int]]:
    """Yield ``begins`` of the events next to metrics.jsonl, reading their file from its end."""
    kinds = tuple(f'"{kind}"' for kind in BEGINS)
    return begins(read_lines_backwards(path.with_name(_EVENTS), with_any=kinds))


def json_value(value: Any) -> Any:
    """A value in which numbers that JSON lacks are null."""
    if isinstance(value, dict):
        return {key: json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
