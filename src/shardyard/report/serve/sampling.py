"""Some lines of a long metrics.jsonl, and all of its evaluations, without parsing the others."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.io.files import open_plain, parse_json
from shardyard.rundir.jsonl import read_lines

Line = dict[str, Any]

LINE_BYTES = 620
"""Approximate bytes of a line of metrics.jsonl."""


def downsample(path: Path, size: int, most: int) -> list[Line]:
    """All lines of a short file; of a long one so many, and all of its evaluations near them."""
    if size <= most * LINE_BYTES:
        return list(read_lines(path))
    lines: list[Line] = []
    file = open_plain(path)
    try:
        for number in range(most):
            lines += _step_after(file, size * number // most)
        end = max(0, size - 4 * LINE_BYTES)
        lines += _whole_lines(file, end, size - end)
    finally:
        os.close(file)
    return lines


def _step_after(file: int, offset: int) -> list[Line]:
    """The first step that begins behind a place, and the evaluations before it."""
    lines: list[Line] = []
    for size in (4 * LINE_BYTES, 64 * LINE_BYTES):  # the second, where lines are long
        for content in _whole_lines(file, offset, size):
            lines.append(content)
            if "eval" not in content:
                return lines
        lines.clear()
    return lines


def _whole_lines(file: int, offset: int, size: int) -> Iterator[Line]:
    """Yield the lines between two places of a file, without the lines that they cut."""
    *lines, _ = os.pread(file, size, offset).split(b"\n")
    for line in lines[1:] if offset else lines:
        if content := step_or_evaluation(line):
            yield content


def step_or_evaluation(line: bytes) -> Line | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    is_line = isinstance(content, dict) and type(content.get("step")) is int
    return content if is_line and isinstance(content.get("eval", {}), dict) else None


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Evaluations in the part of a file that was searched."""

    lines: tuple[Line, ...]
    """Each evaluation behind the line before it."""
    last_line: int
    """Offset of the last whole line, in bytes."""
    end: int
    """Offset of the end of that line."""


NO_SCAN = Scan(lines=(), last_line=0, end=0)
_SCAN_BYTES = 2**20


def scan_evaluations(path: Path, known: Scan) -> Scan:
    """Search what was appended to a file since the last search, without parsing other lines."""
    file = open_plain(path)
    try:
        if os.fstat(file).st_size < known.end:
            known = NO_SCAN
        lines, start, end = list(known.lines), known.last_line, known.end
        data = b""
        while block := os.pread(file, _SCAN_BYTES, start + len(data)):
            data += block
            whole = data.rfind(b"\n") + 1
            if start + whole <= end:
                continue
            lines += _evaluations_in(data, end - start, whole)
            end = start + whole
            last = data.rfind(b"\n", 0, whole - 1) + 1
            data, start = data[last:], start + last
    finally:
        os.close(file)
    return Scan(lines=tuple(lines), last_line=start, end=end)


def _evaluations_in(data: bytes, offset: int, end: int) -> Iterator[Line]:
    """Yield evaluations between two ends of lines, and the line before each."""
    while (place := data.find(b'"eval"', offset, end)) >= 0:
        first, offset = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place) + 1
        line = step_or_evaluation(data[first:offset])
        if line is None or "eval" not in line:
            continue
        before = step_or_evaluation(data[data.rfind(b"\n", 0, max(0, first - 1)) + 1 : first])
        if before is not None:
            yield before
        yield line
