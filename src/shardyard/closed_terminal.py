"""A terminal that closes while a program runs: the program ends as by Ctrl-C, with its clean-up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def is_hang_up_ignored() -> bool:
    """Whether this process outlives its terminal, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@contextmanager
def hang_up_as_ctrl_c() -> Iterator[None]:
    """Within the block SIGHUP raises KeyboardInterrupt, once; under nohup it stays ignored."""
    is_ours = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the clean-up is not to be cut short
        raise KeyboardInterrupt

    signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
