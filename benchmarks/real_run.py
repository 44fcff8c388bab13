"""A run as a user starts it, on some text: a process, ended with all that it has started.

Whatever ends a benchmark ends its runs: an error, Ctrl-C, SIGTERM and SIGHUP (`end_by_signals`) by
the blocks that they leave, and SIGKILL by the kernel, which then asks what was started to stop.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from shardyard.drill.scene import TaggedProcesses
from shardyard.own_processes import signal_at_parent_death

_MARK = "SHARDYARD_BENCHMARK"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def write_corpus(folder: Path) -> None:
    """This package's own source as text: real, small and always there."""
    folder.mkdir()
    source = Path(__file__).parents[1] / "src" / "shardyard"
    for index, file in enumerate(sorted(source.rglob("*.py"))):
        (folder / f"{index:03d}.txt").write_text(file.read_text() or "# empty\n")


def verb(*words: str) -> list[str]:
    """A command of the product."""
    return [sys.executable, "-m", "shardyard", *words]


def program(module: str, *words: str) -> list[str]:
    """A command of the benchmarks, which is found from any folder."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return ["env", f"PYTHONPATH={paths}", sys.executable, "-m", module, *words]


@contextmanager
def running(
    folder: Path,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    marked: TaggedProcesses | None = None,
    out: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a folder; what it says goes into log.txt there.

    Behind the block nothing of it runs, whatever session or parent it has taken.

    Args:
        environment: Beside what it inherits.
        marked: Finds what it has started; for who signals some of that.
        out: Takes its answer; what it says beside that is then said here.
    """
    marked = marked or new_mark()
    process: subprocess.Popen[bytes] | None = None
    try:
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out or log,
                stderr=None if out else log, start_new_session=True,
                preexec_fn=partial(signal_at_parent_death, signal.SIGTERM),
                env={**os.environ, **(environment or {}), **marked.environment},
            )  # fmt: skip
        yield process
    finally:
        marked.kill_all()
        if process is not None:
            process.wait()


def answer_of(folder: Path, command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end; its exit code and its answer."""
    with tempfile.TemporaryFile() as out:
        with running(folder, command, out=out) as process:
            code = process.wait()
        out.seek(0)
        return code, out.read().decode()


def new_mark() -> TaggedProcesses:
    """Of one command and all that it starts; a drill among it has marks of its own."""
    return TaggedProcesses(_MARK)


def end_by_signals() -> None:
    """Have signals end this program as an error does: through all blocks that end its runs."""
    for number in _ENDING:
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)  # what ends the runs is not interrupted
    raise SystemExit(128 + number)
