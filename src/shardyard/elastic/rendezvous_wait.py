"""Messages about a node's wait at the rendezvous: after some seconds, then ever more seldom."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

_FIRST_S = 5.0
"""Nodes of one job come seconds after each other."""
_LONGEST_S = 300.0
"""Between two lines."""


class RendezvousWait:
    """One node's wait: its agent begins it, and another thread reads and reports it.

    Args:
        node_rank: Rank of this node.
        now_s: A monotonic clock.
    """

    def __init__(self, node_rank: int, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._node_rank, self._now_s = node_rank, now_s
        self._what: Callable[[], str] | None = None
        self._until_s = 0.0
        self._next_s, self._pause_s = 0.0, _FIRST_S
        self.silence = ""
        """Service that does not answer, and why; empty: all answer."""

    @contextmanager
    def waits_for(self, what: Callable[[], str], *, within_s: float) -> Iterator[None]:
        """Within the block this node waits for something, at most so long."""
        now_s = self._now_s()
        self._until_s = now_s + within_s
        self._next_s, self._pause_s = now_s + _FIRST_S, _FIRST_S
        self._what = what
        try:
            yield
        finally:
            self._what, self.silence = None, ""

    @property
    def is_waiting(self) -> bool:
        """Whether this node waits for something now."""
        return self._what is not None

    def line(self) -> str | None:
        """Return the message that is due; None: there is none, or too little time has passed."""
        what, now_s = self._what, self._now_s()
        if what is None or now_s < self._next_s:
            return None
        self._pause_s = min(_LONGEST_S, 2 * self._pause_s)
        self._next_s = now_s + self._pause_s
        left_s = max(0.0, self._until_s - now_s)
        until = datetime.now().astimezone() + timedelta(seconds=left_s)
        silence = f" {self.silence}." if self.silence else ""
        return (
            f"node {self._node_rank} waits for {what()}.{silence} It gives up at "
            f"{until:%H:%M:%S}, in {left_s:.0f} s."
        )
