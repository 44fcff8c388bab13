"""SIGTERM and the SIGHUP of a closed terminal end a verb as Ctrl-C does, with its clean-up."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
