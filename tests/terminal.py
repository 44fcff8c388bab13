"""A program in a terminal of its own: type, and read what it shows."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[>=]|\x1b[()]B|\x1b\][^\x07]*\x07|[\r\x07]")
_WAIT_S = 60.0
"""Long on purpose: what is waited for comes at once on an idle machine."""


class Terminal:
    """What a person has: a keyboard and what was shown so far."""

    def __init__(self, descriptor: int, pid: int) -> None:
        self._descriptor = descriptor
        self.pid = pid
        self._shown = ""

    def type(self, keys: str) -> None:
        """Press keys, as ``\\t`` and ``\\n``."""
        os.write(self._descriptor, keys.encode())

    def close(self) -> None:
        """Close the terminal, as its window does."""
        os.close(self._descriptor)

    def wait(self, pattern: str) -> str:
        """Read on until a pattern is shown; returns the text up to its end, without colours.

        Raises:
            AssertionError: It does not come, or the program ended before.
        """
        end_s = time.monotonic() + _WAIT_S
        while time.monotonic() < end_s:
            text = _CONTROL.sub("", self._shown)
            if found := re.search(pattern, text):
                self._shown = text[found.end() :]
                return text[: found.end()]
            if select.select([self._descriptor], [], [], 0.2)[0]:
                try:
                    self._shown += os.read(self._descriptor, 65536).decode(errors="replace")
                except OSError:  # the program has ended, and all that it wrote was read
                    break
        raise AssertionError(f"{pattern!r} was not shown: {_CONTROL.sub('', self._shown)!r}")


@contextmanager
def terminal(
    command: Sequence[str], *, folder: Path, environ: Mapping[str, str]
) -> Iterator[Terminal]:
    """Run a program in a terminal of 50 lines of 200 columns; it is killed at the end."""
    pid, descriptor = pty.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            # a size that the tests' own workers are told is not this terminal's
            inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            os.execvpe(command[0], list(command), {**inherited, **environ})
        finally:
            os._exit(127)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    try:
        yield Terminal(descriptor, pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(OSError):  # closed by the test
            os.close(descriptor)
        os.waitpid(pid, 0)
