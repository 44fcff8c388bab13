"""Time in which this process could not run: stopped, frozen, or on a machine that was suspended.

Such time is no training. The loop leaves it out of the times of its steps, so that rates and
productive time do not count it, and reports it as a pause.

A thread looks at the clock a few times a second. A gap between two looks is a stop (SIGSTOP, a
frozen container) if the process neither used a processor in it nor waited for one. The monotonic
clock leaves out what the machine was suspended for; CLOCK_BOOTTIME counts it, so the difference
grows by each suspension.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardyard.io.polling import poll_in_background

LEAST_S = 1.0
"""Shortest pause."""
_LOOK_EVERY_S = 0.2
_MOST_CPU_SHARE = 0.2
"""A process that used more processor time in a gap was running, and only the thread was late."""

_MOST_DELAY_SHARE = 0.2
"""A thread that waited for a processor for more of the gap was on a busy machine."""

STOPPED = "stopped"
SUSPENDED = "suspended"


@dataclass(frozen=True)
class Pause:
    """One pause, and what caused it: ``STOPPED`` or ``SUSPENDED``."""

    what: str
    seconds: float


def queued_time() -> float:
    """Seconds for which this thread could have run and had no processor; 0 where not counted."""
    try:
        words = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
        return int(words[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class RunningClock:
    """Monotonic clock that stops during pauses."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        boot_time: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        cpu_time: Callable[[], float] = time.process_time,
        queued_time: Callable[[], float] = queued_time,
    ) -> None:
        self._monotonic, self._boot_time = monotonic, boot_time
        self._cpu_time, self._queued_time = cpu_time, queued_time
        self._queued_s: dict[int, float] = {}
        """Queued seconds of each thread that probes."""
        self._lock = threading.Lock()
        self._pauses: list[Pause] = []
        self._stopped_s = 0.0
        self._last_checked_s, self._cpu_s = monotonic(), cpu_time()
        self._asleep_s = boot_time() - self._last_checked_s
        self._is_watched = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the clock in a thread while the block runs; without it no stop is found."""
        # The time before this block was not watched, and must not count as a gap.
        self.now()
        self._is_watched = True
        try:
            with poll_in_background(self.now, every_s=_LOOK_EVERY_S, name="pauses"):
                yield
        finally:
            self._is_watched = False

    def now(self) -> float:
        """Seconds without those of pauses; a pause that has just ended is found here, too."""
        with self._lock:
            now_s, cpu_s = self._monotonic(), self._cpu_time()
            gap_s, used_s = now_s - self._last_checked_s - _LOOK_EVERY_S, cpu_s - self._cpu_s
            queued_s = self._queued()
            ran = used_s > _MOST_CPU_SHARE * gap_s or queued_s > _MOST_DELAY_SHARE * gap_s
            if self._is_watched and gap_s >= LEAST_S and not ran:
                self._stopped_s += gap_s
                self._pauses.append(Pause(STOPPED, gap_s))
            asleep_s = self._boot_time() - now_s
            if asleep_s - self._asleep_s >= LEAST_S:
                self._pauses.append(Pause(SUSPENDED, asleep_s - self._asleep_s))
                self._asleep_s = asleep_s
            self._last_checked_s, self._cpu_s = now_s, cpu_s
            return now_s - self._stopped_s

    def _queued(self) -> float:
        """Seconds for which the calling thread waited for a processor since it last looked."""
        # schedstat is of one thread, and now() is called by the loop and by the probing thread.
        thread, queued_s = threading.get_ident(), self._queued_time()
        before_s = self._queued_s.get(thread, queued_s)
        self._queued_s[thread] = queued_s
        return queued_s - before_s

    def take_pauses(self) -> list[Pause]:
        """The pauses since the last call."""
        self.now()
        with self._lock:
            found, self._pauses = self._pauses, []
        return found
