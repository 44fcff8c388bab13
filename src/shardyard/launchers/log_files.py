"""Several growing files of output as one stream of lines, in bounded memory."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shardyard.io.polling import poll_until
from shardyard.launchers.base import LogLine

_POLL_S = 0.3
_BLOCK_BYTES = 64 * 1024
"""Read of one file before the next has its turn; a longer line comes in several."""


def read_logs(files: Mapping[str, Path], *, is_over: Callable[[], bool]) -> Iterator[LogLine]:
    """Yield the lines of all files, those that are appended included, until it is over.

    Args:
        files: Source -> file; one that is not there yet is waited for.
        is_over: Whether the files are complete; called before the last look.
    """
    offsets = dict.fromkeys(files, 0)
    for is_last in poll_until(is_over, every_s=_POLL_S):
        has_more = True
        while has_more:
            has_more = False
            for source, path in files.items():
                lines, offset = _next_lines(path, offsets[source], is_last=is_last)
                has_more = has_more or offset > offsets[source]
                offsets[source] = offset
                yield from (LogLine(source=source, text=line) for line in lines)


def _next_lines(path: Path, offset: int, *, is_last: bool) -> tuple[list[str], int]:
    """Whole lines of the next block, and where they end; the last line may lack its end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_BLOCK_BYTES)
    except FileNotFoundError:
        return [], offset
    whole = data.rfind(b"\n") + 1
    # Waiting for the end of a line longer than a block would stop this file for ever.
    is_cut = len(data) == _BLOCK_BYTES or is_last
    used = data[:whole] if whole or not is_cut else data
    lines = used.decode(errors="replace").split("\n")  # not at CR: a progress bar is one line
    return lines if lines[-1] else lines[:-1], offset + len(used)
