"""One service is sent what it lacks, again and again, until the run has ended."""

import time
from collections.abc import Callable
from contextlib import suppress

from shardyard.errors import AccessError, RequestError, ShardyardError
from shardyard.io.polling import growing_wait_s
from shardyard.trackers.service import End, Facts, Service
from shardyard.trackers.story import Lines, end_of

_AGAIN_S, _AGAIN_AT_MOST_S = 5.0, 300.0
"""Between tries while a service takes nothing; each time twice as long."""
_AT_END_AGAIN_S = 1.0


class Sending:
    """To one service, of one attempt.

    Args:
        tell: Hears why a service takes nothing, once until it takes something again.
        address: Hears where the run can be seen, once it can.
    """

    def __init__(
        self,
        service: Service,
        facts: Facts,
        *,
        tell: Callable[[str], None],
        address: Callable[[str], None],
    ) -> None:
        self._service = service
        self._facts = facts
        self._tell = tell
        self._address = address
        self._lines = Lines(facts.run)
        self._is_open = self._was_open = False
        self._had = 0
        """Lines that the service has had, as far as it says."""
        self._failures = 0
        self._next_s = 0.0
        """When to try again, by the monotonic clock."""
        self.problem = ""
        """Why it takes nothing now; empty where it does."""

    @property
    def unsent(self) -> int | None:
        """Lines that it has not; None: it keeps no count, so it may have some of them."""
        if self._was_open and not self._service.keeps_count:
            return None
        return max(0, self._lines.count - self._had)

    def look(self) -> None:
        """Send what has come, unless the last try failed a moment ago."""
        if time.monotonic() < self._next_s:
            return
        with suppress(ShardyardError):
            self._send()

    def end(self, *, until_s: float) -> bool:
        """Send what is left, and how the attempt ended; False: it was not all taken.

        Args:
            until_s: By the monotonic clock; from then on nothing is tried again.
        """
        end = end_of(self._facts.run, self._facts.attempt, now_t=time.time())
        while True:
            try:
                self._send()
                self._close(end)
                return True
            except (AccessError, RequestError):  # another try would not help
                return False
            except ShardyardError:
                pass  # its reason is in self.problem
            if time.monotonic() + _AT_END_AGAIN_S >= until_s:
                return False
            time.sleep(_AT_END_AGAIN_S)

    def _close(self, end: End) -> None:
        try:
            self._service.close(end)
        except ShardyardError as error:
            self._fail(error)
            raise

    def _send(self) -> None:
        try:
            if not self._is_open:
                self._had = self._service.open(self._facts)
                self._lines.rewind()
                self._is_open = self._was_open = True
                self._address(self._service.address)
            self._send_lines()
        except ShardyardError as error:
            self._fail(error)
            raise
        self.problem, self._failures, self._next_s = "", 0, 0.0

    def _send_lines(self) -> None:
        while True:
            before = self._lines.seen
            rows = self._lines.read(after=self._had)
            if self._lines.seen == before:
                return
            if rows:
                self._service.send(rows)
            self._had = max(self._had, self._lines.seen)

    def _fail(self, error: ShardyardError) -> None:
        self._is_open = False  # what has come meanwhile, the service itself says best
        if not self.problem:
            self._tell(str(error))
        self.problem = str(error)
        wait_s = growing_wait_s(self._failures, first_s=_AGAIN_S, longest_s=_AGAIN_AT_MOST_S)
        self._failures += 1
        self._next_s = time.monotonic() + wait_s
