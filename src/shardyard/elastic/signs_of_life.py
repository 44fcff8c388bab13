"""Signs of life of other nodes, timed by one's own clock alone.

Torch's rendezvous writes the time of each node's last sign of life, and of the end of the last
call, into the state that all share, and compares both with the reader's clock: where clocks differ,
or one is set, living nodes count as dead. Here what another node wrote is a mark and no time. What
counts is when this node first saw it, by a clock that nobody sets.
"""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shardyard.torch_private import LONG_AGO


@dataclass(frozen=True)
class _Seen:
    """A time that somebody wrote, and when it was first seen here."""

    mark: datetime
    at_s: float


class OwnClock(RendezvousBackend):
    """A rendezvous backend whose times are told by this node's clock.

    Args:
        backend: Keeps the state that all nodes share.
        last_call: Wait for further nodes once the fewest are there.
        now_s: A clock that nobody sets.
    """

    def __init__(
        self,
        backend: RendezvousBackend,
        *,
        last_call: timedelta,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._last_call = last_call
        self._now_s = now_s
        self._seen: dict[Any, _Seen] = {}
        """By node; None: the end of the last call."""
        self._told: dict[Any, datetime] = {}
        """What torch was told instead, when it read the state last."""
        self.expected: int | None = None
        """Nodes that are known to come; once they are there nobody waits for others."""

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """The shared state, in times of this node's clock."""
        found = self._backend.get_state()
        return None if found is None else (self._translated(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write what this node changed; marks of the others stay as they wrote them."""
        found = self._backend.set_state(self._marked(state), token)
        return None if found is None else (self._translated(found[0]), *found[1:])

    def _translated(self, data: bytes) -> bytes:
        state = pickle.loads(data)
        now_s, now = self._now_s(), datetime.now(UTC)
        marks = _times(state)
        self._seen = {
            who: seen
            if (seen := self._seen.get(who)) is not None and seen.mark == mark
            else _Seen(mark, now_s)
            for who, mark in marks.items()
        }
        self._told = {
            who: mark if mark == LONG_AGO else now - timedelta(seconds=now_s - self._seen[who].at_s)
            for who, mark in marks.items()
        }
        if state.deadline is not None and not self._are_all_there(state):
            self._told[None] += self._last_call
        _set_times(state, self._told)
        return pickle.dumps(state)

    def _are_all_there(self, state: Any) -> bool:
        return self.expected is not None and len(state.participants) >= self.expected

    def _marked(self, data: bytes) -> bytes:
        state = pickle.loads(data)
        times = _times(state)
        for who, told in times.items():
            if told == self._told.get(who):  # not of this node's making
                times[who] = self._seen[who].mark
        _set_times(state, times)
        return pickle.dumps(state)


def _times(state: Any) -> dict[Any, datetime]:
    end = {} if state.deadline is None else {None: state.deadline}
    return {**state.last_heartbeats, **end}


def _set_times(state: Any, times: dict[Any, datetime]) -> None:
    state.last_heartbeats = {who: time for who, time in times.items() if who is not None}
    state.deadline = times.get(None)
