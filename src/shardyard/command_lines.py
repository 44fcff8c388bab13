"""Command lines: our own programs by Python, and any text as a word of bash.

Our programs are found in what is installed, never in the current folder. ``python -m`` looks for
every module in the current folder first. A file there called ``statistics.py`` would run in each of
our processes in place of Python's own.
"""

import os
import shlex
import sys
import sysconfig

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
