"""Output of a Slurm job: one file per node and one of the batch script, on the shared folder.

Files are read in turns of bounded size, so that 512 nodes cost no more memory than one.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardyard.launch.base import LogLine

_TURN_BYTES = 1 << 16
_POLL_S = 0.5
_ASK_EVERY_S = 2.0
"""Between questions to the scheduler, which all users share."""


@dataclass
class _Reader:
    """Whole lines of one growing file."""

    path: Path
    source: str
    offset: int = 0
    rest: bytes = b""

    def turn(self) -> list[LogLine]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read(_TURN_BYTES)
        self.offset += len(content)
        *lines, self.rest = (self.rest + content).split(b"\n")
        if len(self.rest) > _TURN_BYTES:  # no line at all, such as a bar that redraws itself
            lines, self.rest = [*lines, self.rest], b""
        return [self._line(line) for line in lines]

    def end(self) -> list[LogLine]:
        """The last line, which nobody finished."""
        rest, self.rest = self.rest, b""
        return [self._line(rest)] if rest else []

    def _line(self, content: bytes) -> LogLine:
        return LogLine(source=self.source, text=content.decode(errors="replace").rstrip("\r"))


def read_logs(
    folder: Path, job_id: str, *, node: int | None, is_over: Callable[[], bool] | None
) -> Iterator[LogLine]:
    """Yield the lines of one node, or of all and of the script itself.

    Args:
        is_over: Asked now and then whether the job has ended; None: only what is there now.
    """
    readers: dict[Path, _Reader] = {}
    asked_at = -_ASK_EVERY_S
    is_last = is_over is None
    while True:
        if is_over and time.monotonic() - asked_at >= _ASK_EVERY_S:
            is_last = is_over()  # before reading: what is written until then is read
            asked_at = time.monotonic()
        for path, source in _files(folder, job_id, node):
            readers.setdefault(path, _Reader(path, source))
        while lines := [line for reader in readers.values() for line in reader.turn()]:
            yield from lines
        if is_last:
            break
        time.sleep(_POLL_S)
    for reader in readers.values():
        yield from reader.end()


def _files(folder: Path, job_id: str, node: int | None) -> list[tuple[Path, str]]:
    found = []
    script = folder / f"slurm-{job_id}.log"
    if node is None and script.is_file():
        found.append((script, "job"))
    prefix = f"slurm-{job_id}-node-"
    for path in folder.glob(f"{prefix}{'*' if node is None else node}.log"):
        number = path.stem.removeprefix(prefix)
        if number.isdigit():
            found.append((path, f"node {number}"))
    return sorted(found, key=lambda each: (len(each[1]), each[1]))
