"""Messages between the agents of one generation, through the rendezvous store.

    shardyard/proposal/<g>  what the node with group rank g holds for the number of this generation,
                            how many ranks the last one had, what it is called, its address,
                            what it holds against nodes
    shardyard/generation    the same of all nodes, from the node of rank 0
    shardyard/workers/<g>   [{rank, node, pid}] of the node with group rank g
    shardyard/losses/<g>    what that node lost

Agents also ask and decide here where a rank may hang (`elastic/hang_finder.py`), or holds up
all others (`elastic/node_exclusion.py`).

Torch gives every rendezvous a store of its own, so no notice outlives its generation.
"""

import json
import pickle
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shardyard.io.files import parse_json
from shardyard.torch_private import LONG_AGO

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Node:
    """Node that an agent speaks for, also after the agent was restarted."""

    name: str
    """Its host name."""
    rank: int
    """Its number in the job; 0 serves the store."""
    machine: str = ""
    """Id of the machine; it differs for a pod of the same name recreated on another machine.

    A restarted machine counts as another one. Empty: the system does not report one.
    """

    @classmethod
    def local(cls, rank: int) -> "Node":
        """This one."""
        is_told = _BOOT_ID.is_file()
        return cls(socket.gethostname(), rank, _BOOT_ID.read_text().strip() if is_told else "")

    def event(self) -> dict[str, Any]:
        """By which events name it."""
        return {"node": self.name, "node_rank": self.rank}

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"


class AgentMessages:
    """One node's view of the notices of all nodes."""

    def __init__(self, store: Any, *, group_rank: int, num_nodes: int) -> None:
        self._store = store
        self._group_rank = group_rank
        self._others = [rank for rank in range(num_nodes) if rank != group_rank]
        self.nodes: list[Node] = []
        """All nodes by group rank, once a generation is agreed on."""
        self.addresses: list[str] = []
        """Addresses of the same nodes, as each sees itself; nodes that know none are omitted."""
        self._joined: list[str] = []
        self._world_size_before = 0
        self.failure_histories: list[dict[str, Any]] = []
        """Losses that each node reported against nodes, once a generation is agreed on."""

    def agree_on_generation(
        self,
        proposal: int,
        me: Node,
        *,
        world_size: int,
        failure_history: Mapping[str, Any],
        address: str | None = None,
    ) -> int:
        """The largest proposal, on every node: one that has just come knows of no earlier ones.

        Args:
            world_size: Of the generation before; 0: this node was in none.
            failure_history: What this node holds against others and itself.
            address: Of this node, where it reaches the rendezvous from; None: it does not know.
        """
        mine = {
            "generation": proposal, "world_size": world_size, "node": asdict(me),
            "held": {**failure_history},
            "address": address,
        }  # fmt: skip
        self._store.set(f"shardyard/proposal/{self._group_rank}", json.dumps(mine))
        if self._group_rank == 0:
            # get() waits for each key, so nothing is agreed before all nodes have proposed.
            theirs = [parse_json(self._store.get(key)) for key in self._keys("proposal")]
            self._store.set("shardyard/generation", json.dumps([mine, *theirs]))
        agreed = parse_json(self._store.get("shardyard/generation"))
        generation = max(int(each["generation"]) for each in agreed)
        self.nodes = [Node(**each["node"]) for each in agreed]
        self.failure_histories = [each["held"] for each in agreed]
        self.addresses = [each["address"] for each in agreed if each["address"] is not None]
        # A lower proposal comes from a node that was not in the generation before.
        there = [each for each in agreed if each["generation"] == generation]
        self._joined = [each["node"]["name"] for each in agreed if each not in there]
        self._world_size_before = max(int(each["world_size"]) for each in there)
        return generation

    def resize_event(self, world_size: int) -> dict[str, Any] | None:
        """Return the changes since the last generation; None without any or for the first."""
        before = self._world_size_before
        if not self._joined and before in (0, world_size):
            return None
        sizes = {"world_size_before": before, "world_size": world_size}
        return {**sizes, "joined": self._joined}

    def publish(self, kind: str, entries: list[dict[str, Any]]) -> None:
        """Tell the other nodes."""
        self._store.set(f"shardyard/{kind}/{self._group_rank}", json.dumps(entries))

    def ask(self, kind: str) -> int:
        """Count one more question of a kind; returns its number, from 1 on."""
        # The store adds atomically: two agents that ask at once get different numbers.
        return int(self._store.add(f"shardyard/{kind}", 1))

    def num_questions(self, kind: str) -> int:
        """Return how many questions of a kind all nodes have asked."""
        # Adds 0, because get() would wait for a counter that no agent has begun.
        return int(self._store.add(f"shardyard/{kind}", 0))

    def decide(self, kind: str, entries: list[dict[str, Any]]) -> None:
        """Tell every node what holds for all."""
        self._store.set(f"shardyard/{kind}", json.dumps(entries))

    def decided(self, kind: str) -> list[dict[str, Any]]:
        """Return the decision for all nodes; empty until a node has published it."""
        key = f"shardyard/{kind}"
        decisions: list[dict[str, Any]] = (
            parse_json(self._store.get(key)) if self._store.check([key]) else []
        )
        return decisions

    def any_from_others(self, kind: str) -> bool:
        """Whether another node has published this kind of notice."""
        return any(self._store.check([key]) for key in self._keys(kind))

    def from_others(self, kind: str, *, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Entries of all other nodes that published within the time; the silent ones are absent."""
        keys = self._keys(kind)
        if keys and wait_s:
            with suppress(DistError):  # a lost node publishes nothing
                self._store.wait(keys, timedelta(seconds=wait_s))
        found = [parse_json(self._store.get(key)) for key in keys if self._store.check([key])]
        return [entry for entries in found for entry in entries]

    def silent(self, kind: str) -> list[int]:
        """Group ranks of the other nodes that have not published this kind of notice."""
        keys = zip(self._others, self._keys(kind), strict=True)
        return [rank for rank, key in keys if not self._store.check([key])]

    def _keys(self, kind: str) -> list[str]:
        return [f"shardyard/{kind}/{rank}" for rank in self._others]


# ``LocalClockBackend`` times the heartbeats of other nodes by this node's clock only.
#
# Torch's rendezvous writes the time of each node's last heartbeat, and of the end of the last call,
# into the shared state and compares both with the reader's clock. If clocks differ, or one is set,
# live nodes count as dead. Here a time that another node wrote is only a mark. The time that counts
# is when this node first saw it, by its monotonic clock.


@dataclass(frozen=True)
class _Seen:
    """A time that somebody wrote, and when it was first seen here."""

    mark: datetime
    at_s: float


class LocalClockBackend(RendezvousBackend):
    """Rendezvous backend with times by this node's clock.

    Args:
        backend: Keeps the state that all nodes share.
        last_call: Wait for further nodes once the fewest are there.
        now_s: A monotonic clock.
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
        self._local_times: dict[Any, datetime] = {}
        """Times that torch got instead, when it last read the state."""
        self.expected: int | None = None
        """Number of nodes that are known to come; once they are there, the wait for others ends."""

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
        # This pickle is safe to load: the backends build it in this process from sealed JSON.
        state = pickle.loads(data)
        now_s, now = self._now_s(), datetime.now(UTC)
        marks = _times(state)
        self._seen = {
            who: seen
            if (seen := self._seen.get(who)) is not None and seen.mark == mark
            else _Seen(mark, now_s)
            for who, mark in marks.items()
        }
        self._local_times = {
            who: mark if mark == LONG_AGO else now - timedelta(seconds=now_s - self._seen[who].at_s)
            for who, mark in marks.items()
        }
        # The last call runs from when this node first saw its mark. Without the addition its end is
        # in the past, and torch completes the rendezvous at once.
        if state.deadline is not None and not self._has_all_nodes(state):
            self._local_times[None] += self._last_call
        _set_times(state, self._local_times)
        return pickle.dumps(state)

    def _has_all_nodes(self, state: Any) -> bool:
        return self.expected is not None and len(state.participants) >= self.expected

    def _marked(self, data: bytes) -> bytes:
        state = pickle.loads(data)
        times = _times(state)
        for who, told in times.items():
            # Unchanged since this node read it, so another node wrote it: keep that node's mark.
            if told == self._local_times.get(who):
                times[who] = self._seen[who].mark
        _set_times(state, times)
        return pickle.dumps(state)


def _times(state: Any) -> dict[Any, datetime]:
    end = {} if state.deadline is None else {None: state.deadline}
    return {**state.last_heartbeats, **end}


def _set_times(state: Any, times: dict[Any, datetime]) -> None:
    state.last_heartbeats = {who: time for who, time in times.items() if who is not None}
    state.deadline = times.get(None)
