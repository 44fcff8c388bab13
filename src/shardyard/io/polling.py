"""Polling for states without a notification: again and again, until found or over."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_MOST_DOUBLINGS = 60
"""Longer than any limit by then, and still a float: 2.0 ** 1024 is none."""


def wait_for(poll: Callable[[], T], *, every_s: float, within_s: float = math.inf) -> T:
    """Call ``poll`` until it finds something, or the time is over.

    Returns:
        The last answer; None or False: not found in time.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        is_last = time.monotonic() >= deadline_s  # asked before: what comes in time is seen
        found = poll()
        if is_last or not (found is None or found is False):
            return found
        time.sleep(every_s)


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Seconds to wait after so many failures in a row: each wait is twice the one before it."""
    return min(longest_s, first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))


def poll_until(
    is_over: Callable[[], bool], *, every_s: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bool]:
    """One turn a look, each with whether it is the last; for a loop that reads what grows.

    Args:
        is_over: Asked before each look, so that the last one sees all that came before the end.
    """
    while not (is_last := is_over()):
        yield is_last
        sleep(every_s)
    yield is_last


@contextmanager
def poll_in_background(
    poll: Callable[[], object], *, every_s: float, name: str, poll_at_end: bool = False
) -> Iterator[None]:
    """Call ``poll`` now and then, in a thread, while the block runs; none continues after it.

    Args:
        poll: Returns True where no other is needed.
        name: Name of the thread.
        poll_at_end: Look once more when the block has ended, so that its end is seen.
    """
    is_over = threading.Event()

    def keep_looking() -> None:
        while not (has_ended := is_over.wait(every_s)) or poll_at_end:
            if poll() is True or has_ended:
                return

    thread = threading.Thread(target=keep_looking, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
