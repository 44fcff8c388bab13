"""Ranks that are paused now and then, as by SIGSTOP and SIGCONT or job control.

The kernel reports it of their processes. Their heartbeats do not show it: a stop within a
collective is a wait of all ranks alike. A rank that stays stopped hangs
(`elastic/hang_watch.py`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import dropwhile, pairwise
from operator import not_

from shardyard.elastic.agent_messages import AgentMessages

WINDOW_S = 10.0
"""Over which looks are counted."""
_FEWEST_STOPS = 3
_LEAST_SHARE = 0.2
"""Least share of stopped looks, so that a step takes at least 1.25 times as long."""
_FEWEST_LOOKS = 50
"""Fewest looks since the first stop.

They are half of those that there are in the window, so that an agent without a processor counts
none.
"""
_WELL_S = 20.0
"""Seconds without a stop before a rank is reported to be well."""
_TELL_EVERY_S = 2.0


@dataclass(frozen=True)
class PauseTransition:
    """A rank is stopped now and then from now on, or is so no more."""

    rank: int
    node: str
    step: int
    """The one that it was at."""
    share: float
    """Share of the time in which it was stopped."""
    is_over: bool

    @property
    def factor(self) -> float:
        """Times as long as its step takes without stops, at most."""
        return 1.0 / (1.0 - self.share)

    def event(self) -> dict[str, object]:
        """Fields of the event that tells it."""
        return {
            "rank": self.rank,
            "node": self.node,
            "what": "stopped",
            "step": self.step,
            "factor": round(self.factor, 4),
            "is_over": self.is_over,
            "stopped_share": round(self.share, 3),
        }


class PauseDetector:
    """Observed stops of one node's ranks; one thread looks, another reads them."""

    def __init__(self, ranks: int) -> None:
        self._samples: deque[tuple[float, tuple[bool, ...]]] = deque()
        self._stopped_s: list[float | None] = [None] * ranks
        """When each was seen stopped last."""
        self._named: set[int] = set()
        self._lock = threading.Lock()

    def take(self, now_s: float, is_stopped: Sequence[bool]) -> None:
        """Count one look, by local rank; ``now_s`` by the monotonic clock."""
        with self._lock:
            self._samples.append((now_s, tuple(is_stopped)))
            while now_s - self._samples[0][0] > WINDOW_S:
                self._samples.popleft()
            for local_rank, stopped in enumerate(is_stopped):
                if stopped:
                    self._stopped_s[local_rank] = now_s

    def transitions(self) -> list[tuple[int, float, bool]]:
        """Return what is new: local rank, share of the time that it was stopped, whether it is
        over."""
        with self._lock:
            transitions: list[tuple[int, float, bool]] = []
            for local_rank in range(len(self._stopped_s)):
                in_window = (stopped[local_rank] for _, stopped in self._samples)
                looks = list(dropwhile(not_, in_window))  # since the first stop
                share = sum(looks) / max(1, len(looks))
                if local_rank in self._named:
                    is_new = self._is_well(local_rank)
                else:
                    stops = sum(now and not before for before, now in pairwise([False, *looks]))
                    is_new = (
                        len(looks) >= _FEWEST_LOOKS
                        and stops >= _FEWEST_STOPS
                        and share >= _LEAST_SHARE
                    )
                if is_new:
                    transitions.append((local_rank, share, local_rank in self._named))
                    self._named ^= {local_rank}
            return transitions

    def _is_well(self, local_rank: int) -> bool:
        stopped_s = self._stopped_s[local_rank]
        return stopped_s is not None and self._samples[-1][0] - stopped_s > _WELL_S


class PauseWatch:
    """One node's part in telling them, in one generation."""

    def __init__(
        self, stops: PauseDetector, messages: AgentMessages, *, node: str, ranks: Sequence[int],
        step_of: Callable[[int], int],
    ) -> None:  # fmt: skip
        """Args:
        ranks: Those of this node, by local rank.
        step_of: The step that a local rank is at.
        """
        self._stops = stops
        self._messages = messages
        self._node = node
        self._ranks = ranks
        self._step_of = step_of
        self._own_transitions: list[PauseTransition] = []
        self._reported: list[PauseTransition] = []
        self._polled_s = time.monotonic()

    def poll(self, *, writes: bool) -> list[PauseTransition]:
        """Now and then, tell the node that writes events, or find what is to be written.

        Args:
            writes: Whether this node's agent writes events.
        """
        if time.monotonic() - self._polled_s < _TELL_EVERY_S:
            return []
        self._polled_s = time.monotonic()
        new = [
            PauseTransition(
                self._ranks[local_rank], self._node, self._step_of(local_rank), share, is_over
            )
            for local_rank, share, is_over in self._stops.transitions()
        ]
        self._own_transitions += new
        if not writes:
            if new:
                # All so far: a key holds one value, and the reader may have missed the last one.
                self._messages.publish("stops", [asdict(turn) for turn in self._own_transitions])
            return []
        theirs = [PauseTransition(**told) for told in self._messages.from_others("stops")]
        untold = [turn for turn in [*self._own_transitions, *theirs] if turn not in self._reported]
        self._reported += untold
        return untold
