"""The snapshots that an agent holds: those of its own ranks and of the ranks of the node before.

All of it is memory that the agent owns and its workers map. Workers write the slots of their own
ranks; what comes from the node before, this process writes.
"""

import mmap
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import WorkerGroup

from shardyard.checkpoint.io_priority import yield_to_training
from shardyard.checkpoint.snapshots import protocol as wire
from shardyard.checkpoint.snapshots.protocol import (
    ReplicationState,
    SnapshotRejectedError,
    SnapshotReplica,
    remote_snapshots_to_json,
)
from shardyard.checkpoint.snapshots.slot import (
    HEAD_BYTES,
    SlotHeader,
    SlotText,
    SnapshotId,
    read_head,
)
from shardyard.config.formulas import ELSEWHERE, SENT, peer_labels, slot_labels
from shardyard.config.schema.recipe import Recipe
from shardyard.control_groups import usable_memory_bytes
from shardyard.elastic.agent_messages import AgentMessages
from shardyard.elastic.seal import Seal
from shardyard.elastic.shared_memory import AgentMemory
from shardyard.network_interface import address_towards, reachable_address
from shardyard.units import format_bytes

_LEAST_SLOTS = 4
"""A node with room for less than so many slots of each of its ranks has none for its own ranks' and
their neighbours': a snapshot that is larger is described wrongly."""


class StoredSnapshot(NamedTuple):
    """A slot that holds something."""

    memory: mmap.mmap
    head: SlotHeader
    text: SlotText


@dataclass
class _Slot:
    """The memory of one slot, and what was read in it last."""

    memory: AgentMemory
    _view: mmap.mmap | None = None
    _read: tuple[SlotHeader, SlotText | None] | None = None

    def view(self) -> mmap.mmap | None:
        """All of it; mapped again only where it has grown."""
        if self._view is None or len(self._view) != self.memory.size_bytes():
            self._view = self.memory.view()
        return self._view

    def snapshot(self) -> StoredSnapshot | None:
        """Return the held snapshot; each text is read once."""
        view = self.view()
        head = None if view is None else read_head(view)
        if view is None or head is None:
            return None
        known = self._read
        if known is None or known[0] != head:
            self._read = known = (head, _text_of(view, head))
        return None if known[1] is None else StoredSnapshot(view, head, known[1])


def _text_of(view: mmap.mmap, head: SlotHeader) -> SlotText | None:
    try:
        return SlotText.from_bytes(view[HEAD_BYTES : HEAD_BYTES + head.text_bytes], head)
    except ValueError:
        return None  # a worker is just rewriting it


class SnapshotStore:
    """All slots of one node."""

    def __init__(self, owned: Mapping[str, AgentMemory], *, local_ranks: int) -> None:
        """Args:
        owned: The agent's memory by label; of each slot at least.
        local_ranks: Of this node, and of each other.
        """
        ranks = range(local_ranks)
        self.local_ranks = local_ranks
        self._own = [[_Slot(owned[label]) for label in slot_labels(local)] for local in ranks]
        self._neighbours = [
            [_Slot(owned[label]) for label in peer_labels(local)] for local in ranks
        ]

    def latest(self, local_rank: int, generation: int) -> StoredSnapshot | None:
        """Return the newest snapshot of one of this node's ranks, taken in this generation."""
        found = [held for slot in self._own[local_rank] if (held := slot.snapshot()) is not None]
        mine = [held for held in found if held.text.snapshot_id.generation == generation]
        return max(mine, key=lambda snapshot: snapshot.text.snapshot_id, default=None)

    def holdings(self) -> list[SnapshotReplica]:
        """Return all holdings, own slots first."""
        return [
            SnapshotReplica(
                step=text.snapshot_id.step, generation=text.snapshot_id.generation, rank=text.rank,
                world_size=text.world_size, slot_bytes=head.slot_bytes,
            )
            for _, head, text in self._all()
        ]  # fmt: skip

    def find(self, snapshot_id: SnapshotId, rank: int, world_size: int) -> StoredSnapshot | None:
        """A certain one."""
        asked = (snapshot_id, rank, world_size)
        found = (
            held
            for held in self._all()
            if (held.text.snapshot_id, held.text.rank, held.text.world_size) == asked
        )
        return next(found, None)

    def allocate(self, local_rank: int, head: SlotHeader) -> mmap.mmap:
        """Memory for the next snapshot of a rank of the node before: where the oldest one lies.

        Raises:
            SnapshotRejectedError: It is too large, or the system refuses the memory.
        """
        most_bytes = usable_memory_bytes() // (_LEAST_SLOTS * self.local_ranks)
        if head.slot_bytes > most_bytes:
            raise SnapshotRejectedError(
                f"a snapshot of {format_bytes(head.slot_bytes)} has no room here, where each may "
                f"have {format_bytes(most_bytes)}"
            )
        slot = min(self._neighbours[local_rank], key=_age)
        try:
            slot.memory.grow(head.slot_bytes)
        except OSError as error:
            raise SnapshotRejectedError(
                f"the system refuses memory for {format_bytes(head.slot_bytes)} ({error.strerror})"
            ) from error
        view = slot.view()
        assert view is not None
        return view

    def _all(self) -> list[StoredSnapshot]:
        slots = [slot for kind in (self._own, self._neighbours) for of in kind for slot in of]
        return [held for slot in slots if (held := slot.snapshot()) is not None]


def _age(slot: _Slot) -> tuple[int, int]:
    """The smallest is of the oldest, or empty."""
    held = slot.snapshot()
    return (
        (-1, -1) if held is None else (held.text.snapshot_id.generation, held.text.snapshot_id.step)
    )


# ``SnapshotServer`` receives the snapshots of the preceding node and serves all that this agent
# holds. Each generation has its own listener, only on the rendezvous network. A client that does
# not know the generation's secret is disconnected before it can send anything else.

_MOST_LINKS = 64
"""At once; further ones wait until another has ended."""


@dataclass(frozen=True)
class ExpectedSnapshots:
    """Whose snapshots are taken in."""

    generation: int
    ranks: range
    """Ranks of the preceding node."""
    world_size: int


class SnapshotServer:
    """Answers until it is closed."""

    def __init__(
        self, host: str, secret: bytes, snapshots: SnapshotStore, expected: ExpectedSnapshots
    ) -> None:
        """Listen on a free port.

        Args:
            host: Address of this node; its other addresses are not listened on.

        Raises:
            OSError: The address cannot be used.
        """
        self._secret, self._snapshots, self._expected = secret, snapshots, expected
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._link_slots = threading.BoundedSemaphore(_MOST_LINKS)
        self._receive_lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections; incomplete snapshots are dropped."""
        self._is_over = True
        for each in (self._listener, *list(self._links)):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self._thread.join()
        self._listener.close()
        with self._receive_lock:  # nothing is written from now on
            pass

    def _listen(self) -> None:
        yield_to_training()
        while not self._is_over:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            # At the limit this waits, and further connections queue in the kernel's backlog.
            self._link_slots.acquire()
            self._links.add(link)
            threading.Thread(
                target=self._serve, args=(link,), name="snapshot-link", daemon=True
            ).start()

    def _serve(self, link: socket.socket) -> None:
        yield_to_training()
        link.settimeout(wire.PATIENCE_S)
        try:
            with link:
                if not wire.authenticate(link, self._secret):
                    raise wire.SnapshotRejectedError("who asked does not know the secret")
                while (asked := wire.next_request(link)) is not None:
                    self._answer(link, asked)
        except (OSError, wire.SnapshotRejectedError) as error:
            if not self._is_over:
                print(f"a snapshot was not taken in or given out: {error}", file=sys.stderr)
        finally:
            self._links.discard(link)
            self._link_slots.release()

    def _answer(self, link: socket.socket, request: wire.RequestKind) -> None:
        match request:
            case wire.RequestKind.PUT:
                with self._receive_lock:  # one after the other: there is one node before
                    wire.receive_slot(link, self._allocate)
            case wire.RequestKind.GET:
                self._send(link)

    def _allocate(self, text: SlotText, head: SlotHeader) -> mmap.mmap:
        expected = self._expected
        whose = (text.snapshot_id.generation, text.world_size)
        if self._is_over or whose != (expected.generation, expected.world_size):
            raise wire.SnapshotRejectedError(
                f"it is of generation {text.snapshot_id.generation} with {text.world_size} ranks, "
                f"and this is generation {expected.generation} with {expected.world_size}"
            )
        if text.rank not in expected.ranks:
            raise wire.SnapshotRejectedError(f"rank {text.rank} is not on the node before this one")
        return self._snapshots.allocate(text.rank - expected.ranks.start, head)

    def _send(self, link: socket.socket) -> None:
        moment, rank, world_size = wire.read_get_request(link)
        held = self._snapshots.find(moment, rank, world_size)
        if held is None:
            wire.reply(link, f"this node has no snapshot of rank {rank} and step {moment.step}")
            return
        wire.reply(link)
        wire.send_slot(link, held.memory, held.head)


# ``PeerReplication`` keeps a replica of each snapshot on a second node.
#
# The nodes of a generation form a ring in the order of their ranks, and each agent sends its ranks'
# snapshots to the next node. A thread reads the agent's own memory and sends each slot that a
# worker has sealed. Workers see in shared memory when the next node has it
# (`checkpoint/snapshots/protocol.py`). At each start of a generation all agents
# publish in the store
#
#     shardyard/snapshot-hosts/<g>   address of the node
#     shardyard/snapshots/<g>        address of the server, and the snapshots that it holds
#
# so that workers find the replicas of a lost node. A client that fetches a snapshot proves that it
# knows the generation's secret, which is derived from that of the attempt.

_OTHERS_S = 10.0
"""For the other agents of a generation, which all begin it at the same time."""
_LOOK_S = 0.02
"""Between two looks for a sealed slot."""
_SOON_S = 6.0
_AGAIN_S = 60.0
"""Seconds until an unreachable or rejecting peer is tried again: first time, and later."""

ReportFunction = Callable[[str], None]
"""Tells why snapshots of this node are not copied; called from a thread."""


@dataclass(frozen=True)
class RingPosition:
    """A node's place among those of a generation."""

    generation: int
    group_rank: int
    num_nodes: int
    store: tuple[str, int]
    """Address of the rendezvous store."""
    seal: Seal
    """Seal of the attempt."""

    @classmethod
    def of(cls, group: WorkerGroup, generation: int, seal: Seal) -> "RingPosition":
        """After a rendezvous, which sets all of it."""
        return cls(
            generation=generation,
            group_rank=int(group.group_rank or 0),
            num_nodes=int(group.group_world_size or 1),
            store=(str(group.master_addr), int(group.master_port or 0)),
            seal=seal,
        )


class PeerReplication:
    """One node's part in the ring."""

    def __init__(
        self, snapshots: SnapshotStore, sent: AgentMemory, peer_index: AgentMemory
    ) -> None:
        self.snapshots = snapshots
        self._peer_index = peer_index
        sent.grow(ReplicationState.bytes_for(snapshots.local_ranks))
        noted = sent.view()
        assert noted is not None
        self._sent = ReplicationState(noted)
        self._server: SnapshotServer | None = None
        self._sender: Sender | None = None

    @classmethod
    def of(
        cls, owned: Mapping[str, AgentMemory | None], recipe: Recipe
    ) -> "PeerReplication | None":
        """None: the recipe wants no copies, or the system has no such memory.

        Args:
            owned: By the labels of ``snapshot_labels``.
        """
        slots = {label: memory for label, memory in owned.items() if memory is not None}
        if SENT not in slots:
            return None
        assert isinstance(recipe.cluster.devices, int)
        held = SnapshotStore(slots, local_ranks=recipe.cluster.devices)
        return cls(held, slots[SENT], slots[ELSEWHERE])

    def begin(
        self, position: RingPosition, messages: AgentMessages, report: ReportFunction
    ) -> None:
        """Enter the ring of a generation, before its workers start. All agents call it."""
        self.close()
        self._sent.begin()
        self._peer_index.write(b"")
        if position.num_nodes == 1:
            return
        try:
            self._enter(position, messages, report)
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

    def _enter(
        self, position: RingPosition, messages: AgentMessages, report: ReportFunction
    ) -> None:
        """Raises:
        OSError: No port can be used here, or a needed agent does not answer.
        """
        ranks, me = self.snapshots.local_ranks, position.group_rank
        before, after = ((me + way) % position.num_nodes for way in (-1, 1))
        # Addresses first: the server must listen on the one of its addresses that the others reach.
        mine = {"host": address_towards(*position.store)}
        hosts = _exchange(messages, "snapshot-hosts", me, mine)
        host = reachable_address(mine["host"], [each["host"] for each in hosts.values()])
        secret = position.seal.derived(f"snapshots of generation {position.generation}")
        self._server = SnapshotServer(
            host,
            secret,
            self.snapshots,
            ExpectedSnapshots(
                generation=position.generation,
                ranks=range(before * ranks, (before + 1) * ranks),
                world_size=position.num_nodes * ranks,
            ),
        )
        held = [asdict(holding) for holding in self.snapshots.holdings()]
        told = {"host": host, "port": self._server.port, "held": held}
        agents = _exchange(messages, "snapshots", me, told)
        self._peer_index.write(
            remote_snapshots_to_json(secret, [agents[other] for other in agents if other != me])
        )
        to = agents[after]
        self._sender = Sender(
            partial(wire.connect, to["host"], to["port"], secret),
            self.snapshots,
            self._sent,
            generation=position.generation,
            report=report,
        )


class Sender:
    """Sends what this node's ranks seal to the next node, one slot after the other."""

    def __init__(
        self,
        meet: Callable[[], socket.socket],
        snapshots: SnapshotStore,
        sent: ReplicationState,
        *,
        generation: int,
        report: ReportFunction,
    ) -> None:
        self._meet, self._snapshots, self._sent = meet, snapshots, sent
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
                    self._sent.set_has_peer(True)
                    self._send_to(self._link)
            except (OSError, wire.SnapshotRejectedError) as error:
                self._failures += 1
                if self._failures > 1 and not self._is_over.is_set():
                    self._report(f"the next node does not take them: {error}")
            finally:
                self._link = None
                # Workers wait for a replica only while this is set; without a peer none comes.
                self._sent.set_has_peer(False)
            # a node that is lost ends the generation before the second try
            self._is_over.wait(_SOON_S if self._failures == 1 else _AGAIN_S)

    def _send_to(self, link: socket.socket) -> None:
        """Until the ring is over, or the connection breaks."""
        while not self._is_over.wait(_LOOK_S):
            for local_rank in range(self._snapshots.local_ranks):
                found = self._snapshots.latest(local_rank, self._generation)
                if found is None or found.text.snapshot_id.step <= self._sent.step(local_rank):
                    continue
                wire.put(link, found.memory, found.head)
                self._sent.note(local_rank, found.text.snapshot_id.step)
                self._failures = 0


def _exchange(
    messages: AgentMessages, kind: str, group_rank: int, payload: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Send the other agents an entry; return the entries of all, by group rank.

    Raises:
        TimeoutError: One of them has not sent one.
    """
    me = {"group_rank": group_rank, **payload}
    messages.publish(kind, [me])
    told = [me, *messages.from_others(kind, wait_s=_OTHERS_S)]
    by_rank = {each["group_rank"]: each for each in told}
    if silent := messages.silent(kind):
        which = ", ".join(map(str, silent))
        raise TimeoutError(f"the agent of node {which} has not said where it is")
    return by_rank
