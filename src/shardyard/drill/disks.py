"""File systems of a case's own, in memory, that can be full at a moment: in namespaces alone.

A file system in memory is full once its size is what is used of it, so nothing has to be written.
"""

import os
import stat
import subprocess
from pathlib import Path

_ROOM = "50%"
"""Of the machine's memory: the usual size; nothing is taken before it is used."""
_ATTEMPTS = 100
"""To fill what a run goes on writing to."""


def mount_own(folder: Path) -> None:
    """Put an empty file system over a folder, which stays writable by whom it was."""
    folder.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)  # else everybody's, as /tmp is
    _mount("-t", "tmpfs", "-o", f"size={_ROOM},mode={mode:o}", "tmpfs", str(folder))


def fill(folder: Path) -> None:
    """Leave no room there, and what is there as it is.

    Raises:
        subprocess.CalledProcessError: It was written to faster than it could be filled.
    """
    for attempt in range(_ATTEMPTS):
        found = os.statvfs(folder)
        used_bytes = max(1, found.f_blocks - found.f_bfree) * found.f_frsize
        try:
            _mount("-o", f"remount,size={used_bytes}", str(folder))
        except subprocess.CalledProcessError:  # more is used by now, and none may be lost
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            return


def make_room(folder: Path) -> None:
    """As much as there was."""
    _mount("-o", f"remount,size={_ROOM}", str(folder))


def unmount(folder: Path) -> None:
    """Take it away, with all that is in it."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
