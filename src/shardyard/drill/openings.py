"""Word of the kernel that somebody opens files of a checkpoint: inotify(7).

Those of a small model are open for less than a millisecond, so that looks into `/proc/PID/fd` came
too late for half of them.
"""

import ctypes
import errno
import os
import select
from pathlib import Path

_OPENED = 0x20
"""IN_OPEN of linux/inotify.h."""
_MOST_BYTES = 1 << 16
"""Of words read at once; one takes 16 and its file's name."""


class Openings:
    """Of tensor files that lie in folders; each is watched until `close`.

    A folder that is gone is left out: a run removes its old checkpoints.
    """

    def __init__(self, folders: list[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._words: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._words < 0:
            raise _refused()
        for folder in folders:
            watched = libc.inotify_add_watch(self._words, os.fsencode(folder), _OPENED)
            if watched < 0 and ctypes.get_errno() != errno.ENOENT:
                self.close()
                raise _refused(folder)

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._words)

    def have_come(self, within_s: float) -> bool:
        """Whether a tensor file was opened since the last call, or is within these seconds."""
        if not select.select([self._words], [], [], within_s)[0]:
            return False
        return b".safetensors\0" in os.read(self._words, _MOST_BYTES)


def _refused(folder: Path | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), None if folder is None else str(folder))
