"""Our own processes: command lines that start them, and signals that end them.

Our programs are found in what is installed, never in the current folder. ``python -m`` looks for
every module in the current folder first. A file there called ``statistics.py`` would run in each of
our processes in place of Python's own.

SIGTERM and the SIGHUP of a closed terminal end a verb as Ctrl-C does, with its clean-up.
"""

import os
import shlex
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ISOLATED = ("-P", "-m")
"""Options before the name of a module; processes that it starts by ``multiprocessing`` have them
too."""


def python_program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module on this machine."""
    return [sys.executable, *ISOLATED, module, *arguments]


def add_current_folder_to_path() -> None:
    """Find modules of the current folder too: before installed packages, behind Python's own."""
    folder = os.getcwd()  # noqa: PTH109 (a text)
    if folder in sys.path:
        return
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {f"{each}/lib-dynload" for each in own}
    last = max((place for place, each in enumerate(sys.path) if each in own), default=-1)
    sys.path.insert(last + 1, folder)


def word(text: str) -> str:
    """Return one word of bash for a text.

    sbatch takes no script with CR LF, and text on a terminal must not act on it.
    """
    if text.isprintable():
        return shlex.quote(text)
    # $'...' is bash's, not that of POSIX shells: the batch script names /bin/bash.
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else _in_bytes(c) for c in quoted) + "'"


def _in_bytes(character: str) -> str:
    # As bytes, because bash writes \u in the locale's encoding, which on a node may be another.
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def is_hang_up_ignored() -> bool:
    """Whether this process outlives its terminal, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within the block SIGHUP raises KeyboardInterrupt, SIGTERM SystemExit(143); once each.

    A signal that is ignored, or that somebody else handles, is left as it is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in (signal.SIGHUP, signal.SIGTERM)
               if is_main and signal.getsignal(number) is signal.SIG_DFL]  # fmt: skip
    owner = os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork that has not set its own: the clean-up is not its
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not to be cut short
        if number == signal.SIGHUP:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def end_with(parent_pid: int) -> None:
    """Make this process end at once when its parent does: neither is useful without the other."""
    signal_at_parent_death(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the kernel knew of the wish
        os.kill(os.getpid(), signal.SIGKILL)


def signal_at_parent_death(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (Linux)."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    _prctl(pr_set_pdeathsig, number)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show for this process, at most 15 letters (Linux)."""
    pr_set_name = 15  # linux/prctl.h
    _prctl(pr_set_name, name.encode())


def _prctl(option: int, argument: Any) -> None:
    import ctypes  # not above: few verbs need it

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
