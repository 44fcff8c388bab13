"""A drain: the wish to stop soon with the last step saved, expressed by a signal to the agent.

SIGTERM and SIGINT ask; a second one no longer wants to wait, unless a scheduler started this agent:
it may send several, directly and through the node's program. SIGHUP only ever asks: the kernel
sends it when the command line that started this agent is killed.
"""

import os
import signal
import time
from types import FrameType

from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED
from shardyard.own_processes import signal_at_parent_death

_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SECOND_SIGNAL_AFTER_S = 0.5
"""Signals closer than this are one wish: a terminal and the command line may both pass it on."""


class DrainRequest:
    """Stop requests by signal; the main thread writes them, any thread reads them."""

    def __init__(self, timeout_s: float, *, ignore_repeats: bool = False) -> None:
        self.timeout_s = timeout_s
        self._ignore_repeats = ignore_repeats
        self.signal: signal.Signals | None = None
        self._since_s = 0.0
        self._insisted = False

    def listen(self) -> None:
        """Take over the asking signals. Only the main thread may call this."""
        for number in _ASKING:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)  # held back by the command line

    def stop_listening(self) -> None:
        """Ignore further signals: the answer is known and this process ends."""
        for number in _ASKING:
            signal.signal(number, signal.SIG_IGN)

    def listen_for_end_of(self, parent_pid: int) -> None:
        """Drain too when the process that started this one ends."""
        signal_at_parent_death(signal.SIGHUP)
        if os.getppid() != parent_pid:  # it ended before the kernel knew of the wish
            self._on_signal(signal.SIGHUP, None)

    @property
    def is_requested(self) -> bool:
        return self.signal is not None

    @property
    def is_overdue(self) -> bool:
        """Whether workers that have not drained yet are to be killed."""
        if self.signal is None:
            return False
        return self._insisted or time.monotonic() - self._since_s > self.timeout_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds left for the drain; None: no stop was requested."""
        if self.signal is None:
            return None
        return self.timeout_s - (time.monotonic() - self._since_s)

    @property
    def overdue_reason(self) -> str:
        if self._insisted:
            return "a second signal came"
        return f"the {self.timeout_s:g} s of elastic.drain_timeout_s were over"

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self.signal is signal.SIGINT else EXIT_DRAINED

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is None:
            # Set before the signal, which tells other threads that there is a drain to time.
            self._since_s = now_s
            self.signal = signal.Signals(number)
        elif not self._ignore_repeats and number != signal.SIGHUP:
            self._insisted |= now_s - self._since_s > _SECOND_SIGNAL_AFTER_S
