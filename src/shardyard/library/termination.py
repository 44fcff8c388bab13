"""Work that a process finishes before SIGTERM ends it."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class BeforeTermination:
    """Calls something at SIGTERM, then lets the signal end the process as it would have.

    A handler that the script has set stays in place of this one.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._is_postponed = False
        self._has_come = False

    def __enter__(self) -> Self:
        if _may_handle() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if _may_handle() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """A signal that comes inside takes effect at the end."""
        self._is_postponed = True
        try:
            yield
        finally:
            self._is_postponed = False
            if self._has_come:
                self._end()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._has_come = True
        if not self._is_postponed:
            self._end()

    def _end(self) -> None:
        self._act()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _may_handle() -> bool:
    """Whether Python lets this thread set handlers."""
    return threading.current_thread() is threading.main_thread()
