"""Snapshots on a second node: each agent sends those of its ranks to the next one.

The nodes of a generation stand in a ring, in the order of their ranks. A thread of the agent reads
the agent's own memory and sends each slot that a worker has sealed; workers learn in memory that
the neighbour has it (`checkpoint/snapshots/snapshot_sent.py`). At each start of a generation all agents tell
each other through the store

    shardyard/snapshot-hosts/<g>   its address
    shardyard/snapshots/<g>        where it answers, and which snapshots it holds

so that workers find what a lost node has left with its neighbour. Whoever comes for a snapshot
shows that it knows a secret of the generation, which is made of that of the attempt.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from shardyard.checkpoint.snapshots import snapshot_wire as wire
from shardyard.checkpoint.snapshots.snapshot_fetch import offers_to_json
from shardyard.checkpoint.snapshots.snapshot_sent import Sent
from shardyard.checkpoint.yielding import yield_to_training
from shardyard.config.schema.recipe import Recipe
from shardyard.config.snapshots import ELSEWHERE, SENT
from shardyard.elastic.agent_memory import AgentMemory
from shardyard.elastic.held_snapshots import HeldSnapshots
from shardyard.elastic.notices import Notices
from shardyard.elastic.seal import Seal
from shardyard.elastic.snapshot_server import Expected, SnapshotServer
from shardyard.network_interface import address_towards, reachable

_OTHERS_S = 10.0
"""For the other agents of a generation, which all begin it at the same time."""
_LOOK_S = 0.02
"""Between two looks for a sealed slot."""
_SOON_S = 6.0
_AGAIN_S = 60.0
"""Until a neighbour that could not be reached, or refused a snapshot, is tried again: the first
time, and later."""

Report = Callable[[str], None]
"""Tells why snapshots of this node are not copied; called from a thread."""


@dataclass(frozen=True)
class Place:
    """A node's place among those of a generation."""

    generation: int
    group_rank: int
    num_nodes: int
    store: tuple[str, int]
    """Where the store of the meeting answers."""
    seal: Seal
    """Of the attempt."""

    @classmethod
    def of(cls, group: WorkerGroup, generation: int, seal: Seal) -> "Place":
        """After a rendezvous, which sets all of it."""
        return cls(
            generation=generation,
            group_rank=int(group.group_rank or 0),
            num_nodes=int(group.group_world_size or 1),
            store=(str(group.master_addr), int(group.master_port or 0)),
            seal=seal,
        )


class Neighbour:
    """One node's part in the ring."""

    def __init__(self, held: HeldSnapshots, sent: AgentMemory, elsewhere: AgentMemory) -> None:
        self.held = held
        self._elsewhere = elsewhere
        sent.grow(Sent.bytes_for(held.local_ranks))
        noted = sent.view()
        assert noted is not None
        self._sent = Sent(noted)
        self._server: SnapshotServer | None = None
        self._sender: Sender | None = None

    @classmethod
    def of(cls, owned: Mapping[str, AgentMemory | None], recipe: Recipe) -> "Neighbour | None":
        """None: the recipe wants no copies, or the system has no such memory.

        Args:
            owned: By the labels of ``snapshot_labels``.
        """
        slots = {label: memory for label, memory in owned.items() if memory is not None}
        if SENT not in slots:
            return None
        assert isinstance(recipe.cluster.devices, int)
        held = HeldSnapshots(slots, local_ranks=recipe.cluster.devices)
        return cls(held, slots[SENT], slots[ELSEWHERE])

    def begin(self, place: Place, notices: Notices, report: Report) -> None:
        """Enter the ring of a generation, before its workers start. All agents call it."""
        self.close()
        self._sent.begin()
        self._elsewhere.write(b"")
        if place.num_nodes == 1:
            return
        try:
            self._enter(place, notices, report)
        except OSError as error:
            report(str(error))
            self.close()

    def close(self) -> None:
        """Leave the ring; what is held is kept."""
        if self._sender is not None:
            self._sender.close()
        if self._server is not None:
            self._server.close()
        self._sender = self._server = None

    def _enter(self, place: Place, notices: Notices, report: Report) -> None:
        """Raises:
        OSError: Nothing can listen here, or an agent that is needed does not say anything.
        """
        ranks, me = self.held.local_ranks, place.group_rank
        before, after = ((me + way) % place.num_nodes for way in (-1, 1))
        mine = {"host": address_towards(*place.store)}
        hosts = _exchange(notices, "snapshot-hosts", me, mine)
        host = reachable(mine["host"], [each["host"] for each in hosts.values()])
        secret = place.seal.derived(f"snapshots of generation {place.generation}")
        self._server = SnapshotServer(
            host,
            secret,
            self.held,
            Expected(
                generation=place.generation,
                ranks=range(before * ranks, (before + 1) * ranks),
                world_size=place.num_nodes * ranks,
            ),
        )
        held = [asdict(holding) for holding in self.held.holdings()]
        told = {"host": host, "port": self._server.port, "held": held}
        agents = _exchange(notices, "snapshots", me, told)
        self._elsewhere.write(
            offers_to_json(secret, [agents[other] for other in agents if other != me])
        )
        to = agents[after]
        self._sender = Sender(
            partial(wire.meet, to["host"], to["port"], secret),
            self.held,
            self._sent,
            generation=place.generation,
            report=report,
        )


class Sender:
    """Sends what this node's ranks seal to the next node, one slot after the other."""

    def __init__(
        self,
        meet: Callable[[], socket.socket],
        held: HeldSnapshots,
        sent: Sent,
        *,
        generation: int,
        report: Report,
    ) -> None:
        self._meet, self._held, self._sent = meet, held, sent
        self._generation, self._report = generation, report
        self._failures = 0
        """In a row."""
        self._is_over = threading.Event()
        self._link: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="snapshot-copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Break off."""
        self._is_over.set()
        if (link := self._link) is not None:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        yield_to_training()
        while not self._is_over.is_set():
            try:
                with self._meet() as self._link:
                    self._sent.have_neighbour(True)
                    self._send_to(self._link)
            except (OSError, wire.SnapshotRefusedError) as error:
                self._failures += 1
                if self._failures > 1 and not self._is_over.is_set():
                    self._report(f"the next node does not take them: {error}")
            finally:
                self._link = None
                self._sent.have_neighbour(False)
            # a node that is lost ends the generation before the second try
            self._is_over.wait(_SOON_S if self._failures == 1 else _AGAIN_S)

    def _send_to(self, link: socket.socket) -> None:
        """Until the ring is over, or the connection breaks."""
        while not self._is_over.wait(_LOOK_S):
            for local_rank in range(self._held.local_ranks):
                found = self._held.newest(local_rank, self._generation)
                if found is None or found.text.moment.step <= self._sent.step(local_rank):
                    continue
                wire.put(link, found.memory, found.head)
                self._sent.note(local_rank, found.text.moment.step)
                self._failures = 0


def _exchange(
    notices: Notices, kind: str, group_rank: int, mine: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Tell the other agents something; what all have told, by group rank.

    Raises:
        TimeoutError: One of them has not.
    """
    me = {"group_rank": group_rank, **mine}
    notices.publish(kind, [me])
    told = [me, *notices.from_others(kind, wait_s=_OTHERS_S)]
    by_rank = {each["group_rank"]: each for each in told}
    if silent := notices.silent(kind):
        which = ", ".join(map(str, silent))
        raise TimeoutError(f"the agent of node {which} has not said where it is")
    return by_rank
