"""Agents that keep each other's snapshots: several in this process, with real sockets."""

import json
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # built in C++

from shardyard.checkpoint.snapshots import protocol as wire
from shardyard.checkpoint.snapshots.protocol import ReplicationState, read_remote_snapshots
from shardyard.checkpoint.snapshots.slot import SnapshotId, read_head
from shardyard.config.formulas import ELSEWHERE, SENT, slot_labels, snapshot_labels
from shardyard.config.schema.recipe import Cluster, Elastic, Recipe
from shardyard.elastic.agent_messages import AgentMessages
from shardyard.elastic.peer_snapshots import PeerReplication, RingPosition
from shardyard.elastic.seal import Seal
from shardyard.elastic.shared_memory import AgentMemory
from tests.checkpoint.slots import room_for, rows, seal, slot_of
from tests.elastic.agents import wait_until

RECIPE = Recipe(
    cluster=Cluster(devices=1, nodes=2), elastic=Elastic(snapshot_every=1, snapshot_neighbour=True)
)


@dataclass
class Node:
    """One agent's part, with one worker."""

    owned: dict[str, AgentMemory]
    neighbour: PeerReplication

    def memory(self, label: str, _size_bytes: int | None = None, /) -> mmap.mmap | None:
        """As a worker of the node sees it."""
        return self.owned[label].view()

    @property
    def sent(self) -> ReplicationState:
        view = self.owned[SENT].view()
        assert view is not None
        return ReplicationState(view)

    def take(self, moment: SnapshotId, *, rank: int, world_size: int, slot: int = 0) -> None:
        """A snapshot, as the node's worker takes it."""
        piece = self.owned[slot_labels(0)[slot]]
        state = rows(moment.step * 10 + rank)
        piece.grow(room_for(state).slot_bytes)
        view = piece.view()
        assert view is not None
        seal(view, state, moment, rank=rank, world_size=world_size)

    def offers(self) -> list[tuple[SnapshotId, int]]:
        return [(offer.snapshot_id, offer.rank) for offer in read_remote_snapshots(self.memory)]


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Node]]:
    """Start the agent of another node."""
    labels, nodes = snapshot_labels(RECIPE), list[Node]()
    for label in labels:  # removed again afterwards
        monkeypatch.setenv(f"SHARDYARD_MEMORY_{label.upper()}", "")

    def make() -> Node:
        owned = {label: memory for label in labels if (memory := AgentMemory.create(label))}
        neighbour = PeerReplication.of(owned, RECIPE)
        assert neighbour is not None
        nodes.append(Node(owned, neighbour))
        return nodes[-1]

    yield make
    for node in nodes:
        node.neighbour.close()
        for memory in node.owned.values():
            os.close(memory.descriptor)


def meet(
    nodes: Sequence[Node], generation: int, report: Callable[[str], None] = lambda _why: None
) -> None:
    """All of them begin a generation."""
    store = HashStore()

    def begin(rank: int) -> None:
        place = RingPosition(generation, rank, len(nodes), ("127.0.0.1", 29400), Seal(b"s" * 32))
        notices = AgentMessages(store, group_rank=rank, num_nodes=len(nodes))
        nodes[rank].neighbour.begin(place, notices, report)

    with ThreadPoolExecutor() as pool:
        list(pool.map(begin, range(len(nodes))))


def wait_for_copy(node: Node, step: int) -> None:
    wait_until(lambda: node.sent.step(0) == step)


def test_a_snapshot_counts_once_the_next_node_holds_it(come: Callable[[], Node]) -> None:
    first, second = come(), come()
    meet([first, second], generation=4)
    wait_until(lambda: first.sent.is_awaited(0, 5))
    first.take(SnapshotId(5, 4), rank=0, world_size=2)
    wait_for_copy(first, 5)
    assert not first.sent.is_awaited(0, 5) and second.sent.step(0) == -1
    held = second.neighbour.snapshots.find(SnapshotId(5, 4), 0, 2)
    assert held is not None and held.text.values == {"at": 5}


def test_two_copies_of_each_rank_are_kept_and_the_older_is_replaced(
    come: Callable[[], Node],
) -> None:
    first, second = come(), come()
    meet([first, second], generation=0)
    for step in (3, 6, 9):
        first.take(SnapshotId(step, 0), rank=0, world_size=2, slot=step // 3 - 1)
        wait_for_copy(first, step)
    assert sorted(each.step for each in second.neighbour.snapshots.holdings()) == [6, 9]


def test_what_a_lost_node_left_with_its_neighbour_is_found_by_the_one_in_its_place(
    come: Callable[[], Node],
) -> None:
    lost, left = come(), come()
    meet([lost, left], generation=0)
    for rank, node in enumerate((lost, left)):
        node.take(SnapshotId(7, 0), rank=rank, world_size=2)
        wait_for_copy(node, 7)
    lost.neighbour.close()
    replacement = come()
    meet([replacement, left], generation=1)
    assert replacement.offers() == [(SnapshotId(7, 0), 1), (SnapshotId(7, 0), 0)]
    offer = next(each for each in read_remote_snapshots(replacement.memory) if each.rank == 0)
    assert offer.read().shard("model.w").tolist() == rows(70)["model.w"].tolist()


def test_of_three_nodes_each_keeps_what_the_one_before_has(come: Callable[[], Node]) -> None:
    nodes = [come() for _ in range(3)]
    meet(nodes, generation=0)
    for rank, node in enumerate(nodes):
        node.take(SnapshotId(2, 0), rank=rank, world_size=3)
        wait_for_copy(node, 2)
    kept = [[each.rank for each in node.neighbour.snapshots.holdings()] for node in nodes]
    assert kept == [[0, 2], [1, 0], [2, 1]]

    gone, *left = nodes
    gone.neighbour.close()
    meet(left, generation=1)  # now the second follows the last
    left[0].take(SnapshotId(4, 1), rank=0, world_size=2, slot=1)
    left[1].take(SnapshotId(4, 1), rank=1, world_size=2, slot=1)
    wait_for_copy(left[0], 4)
    wait_for_copy(left[1], 4)
    assert left[0].neighbour.snapshots.find(SnapshotId(4, 1), 1, 2) is not None


def test_a_neighbour_that_goes_in_the_middle_keeps_nobody_waiting(
    come: Callable[[], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.elastic.peer_snapshots._SOON_S", 0.2)
    told: list[str] = []
    first, second = come(), come()
    meet([first, second], 0, told.append)
    wait_until(lambda: first.sent.is_awaited(0, 1))
    second.neighbour.close()
    first.take(SnapshotId(1, 0), rank=0, world_size=2)
    wait_until(lambda: not first.sent.is_awaited(0, 1))
    assert first.sent.step(0) == -1
    assert told == []  # a node that is lost is told as such
    wait_until(lambda: bool(told))
    assert told[0].startswith("the next node does not take them: ")


def test_one_node_alone_waits_for_nobody(come: Callable[[], Node]) -> None:
    node = come()
    meet([node], generation=0)
    assert not node.sent.is_awaited(0, 1) and read_remote_snapshots(node.memory) == []


def test_an_agent_that_says_nothing_is_told_and_nothing_is_copied(
    come: Callable[[], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.elastic.peer_snapshots._OTHERS_S", 0.1)
    told: list[str] = []
    node = come()
    notices = AgentMessages(HashStore(), group_rank=1, num_nodes=2)
    node.neighbour.begin(
        RingPosition(0, 1, 2, ("127.0.0.1", 29400), Seal(b"s" * 32)), notices, told.append
    )
    assert told == ["the agent of node 0 has not said where it is"]
    assert not node.sent.is_awaited(0, 1)


# --- what a server refuses -----------------------------------------------------------------------


def told(node: Node) -> tuple[str, int, bytes]:
    """Where the other agent answers, as a worker of this node reads it, and the secret."""
    view = node.memory(ELSEWHERE)
    assert view is not None
    content = json.loads(view[:])
    (agent,) = content["agents"]
    return agent["host"], agent["port"], bytes.fromhex(content["secret"])


def linked(node: Node) -> socket.socket:
    """A connection to the other agent."""
    return wire.connect(*told(node))


@pytest.mark.parametrize(
    ("moment", "rank", "world_size", "why"),
    [
        (SnapshotId(5, 3), 0, 2, "it is of generation 3 with 2 ranks"),
        (SnapshotId(5, 4), 0, 3, "generation 4 with 3 ranks"),
        (SnapshotId(5, 4), 1, 2, "rank 1 is not on the node before this one"),
    ],
)
def test_a_snapshot_of_somebody_else_is_refused(
    come: Callable[[], Node], moment: SnapshotId, rank: int, world_size: int, why: str
) -> None:
    first, second = come(), come()
    meet([first, second], generation=4)
    slot = slot_of(rows(1), moment, rank=rank, world_size=world_size)
    head = read_head(slot)
    assert head is not None
    with linked(first) as link, pytest.raises(wire.SnapshotRejectedError, match=why):
        wire.put(link, slot, head)
    assert second.neighbour.snapshots.holdings() == []


def test_one_that_the_node_has_no_room_for_is_refused(
    come: Callable[[], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.elastic.peer_snapshots.usable_memory_bytes", lambda: 4 * 2**20)
    first, second = come(), come()
    meet([first, second], generation=4)
    slot = slot_of(rows(1), SnapshotId(5, 4), world_size=2)
    head = read_head(slot)
    assert head is not None
    with (
        linked(first) as link,
        pytest.raises(
            wire.SnapshotRejectedError,
            match=r"of 1.0 MiB has no room here, where each may have 1.0 MiB",
        ),
    ):
        wire.put(link, slot, head)


def test_one_that_is_not_held_any_more_is_told(come: Callable[[], Node]) -> None:
    first, second = come(), come()
    meet([first, second], generation=4)
    with (
        linked(first) as link,
        pytest.raises(
            wire.SnapshotRejectedError, match="this node has no snapshot of rank 1 and step 5"
        ),
    ):
        wire.get(
            link, SnapshotId(5, 4), rank=1, world_size=2, allocate=lambda _t, _h: mmap.mmap(-1, 1)
        )


def test_the_secret_of_the_generation_before_opens_nothing(
    come: Callable[[], Node], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = come(), come()
    meet([first, second], generation=0)
    *_, before = told(first)
    meet([first, second], generation=1)
    host, port, now = told(first)
    assert now != before
    with pytest.raises(OSError, match="ended in the middle"):
        wire.connect(host, port, before)
    said = ""

    def is_told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "who asked does not know the secret" in said

    wait_until(is_told)


def test_nothing_listens_beyond_the_loopback_interface_where_the_agents_meet_there(
    come: Callable[[], Node],
) -> None:
    first, second = come(), come()
    meet([first, second], generation=0)
    with linked(first) as link:
        assert link.getpeername()[0] == "127.0.0.1"
