"""Detection of a run folder that is removed, renamed or unmounted while the run trains.

No other check would notice: open files stay writable, so steps continue until one cannot be
saved.
"""

import errno
import threading
from pathlib import Path

_LOOK_EVERY_S = 1.0
_LOOKS = 2
"""In a row: storage that others share may hide a file for a moment."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FolderWatch:
    """Checks for one file now and then, in a thread, so that hanging storage blocks only that."""

    def __init__(self, file: Path) -> None:
        """Begin to watch a file that is there as long as its folder is."""
        self._file = file
        self._is_over = threading.Event()
        self.is_gone = False
        threading.Thread(target=self._watch, name="folder-watch", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def is_missing(self) -> bool:
        """Look now: what failed for want of the folder may have ended before it was missed."""
        return not _is_present(self._file)

    def _watch(self) -> None:
        missed = 0
        while not (self.is_gone or self._is_over.wait(_LOOK_EVERY_S)):
            missed = 0 if _is_present(self._file) else missed + 1
            self.is_gone = missed >= _LOOKS


def _is_present(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:  # others may pass, or the next write reports them
        return error.errno not in _GONE
    return True
