"""Work of a script that SIGTERM lets finish before the signal ends its process."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class BeforeTermination:
    """Calls something at SIGTERM, then lets the signal end the process as it would have.

    Blocks may be nested: the inner one acts first. A handler that the script has set stays in
    place of ours.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._is_postponed = False
        self._has_come = False
        self._previous: Any = signal.SIG_DFL
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        if _may_handle():
            found = signal.getsignal(signal.SIGTERM)
            if found is signal.SIG_DFL or _is_before_termination(found):
                self._previous = found
                signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if _may_handle() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

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
        if os.getpid() != self._owner:  # a fork, whose end is not the script's
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._has_come = True
        if not self._is_postponed:
            self._end()

    def _end(self) -> None:
        self._act()
        signal.signal(signal.SIGTERM, self._previous)
        os.kill(os.getpid(), signal.SIGTERM)


def _may_handle() -> bool:
    """Whether Python lets this thread set handlers."""
    return threading.current_thread() is threading.main_thread()


def _is_before_termination(handler: object) -> bool:
    return isinstance(getattr(handler, "__self__", None), BeforeTermination)
