"""Events of the group in events.jsonl, written by the agent of one of its nodes.

This part decides which agent writes, and in which order the events of a loss come.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shardyard.elastic.hang_watch import Hang
from shardyard.elastic.membership import GroupMembership
from shardyard.elastic.worker_failures import Loss, LostNode, causes, first_cause
from shardyard.errors import StorageError
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir

_PEER_START_S = 60.0


class EventReporter:
    """Writes the events of one attempt, if it is this node's turn."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        membership: GroupMembership,
        *,
        describe_attempt: Callable[[], dict[str, Any]],
        is_lease_available: Callable[[], bool],
    ) -> None:
        """Args:
        describe_attempt: Returns further fields of the event ``attempt_started``.
        is_lease_available: Whether no agent of another node holds the run.
        """
        self._run = run
        self._attempt = attempt
        self._membership = membership
        self._describe_attempt = describe_attempt
        self._is_lease_available = is_lease_available
        self._events: EventWriter | None = None
        self._reported_lost: set[int] = set()
        """Nodes whose loss was reported."""

    @property
    def writes_events(self) -> bool:
        """Whether no node of a lower rank is left; false until the first rendezvous.

        Where one of them holds the run still, this node is cut off, and the lost one itself.
        """
        rank = self._membership.group_rank
        gone = {lost.group_rank for lost in self._membership.lost_nodes}
        if self._membership.is_excluded or rank is None or not gone.issuperset(range(rank)):
            return False
        return rank == 0 or self._is_lease_available()

    def write(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl if this node is the one that writes events."""
        if self.writes_events:
            self.write_own(kind, **fields)

    def write_own(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl from any node: other agents do not know of it."""
        with suppress(StorageError):  # a full disk must not hide why the attempt ends
            if self._events is None:
                self._events = EventWriter(
                    self._run.events, attempt=self._attempt, generation=self._membership.generation
                )
            self._events.generation = self._membership.generation
            self._events.write(kind, **fields)

    def announce(self, own_workers: list[dict[str, Any]], *, rendezvous_s: float) -> None:
        """Report that the workers of a generation have started, on all nodes.

        Args:
            own_workers: Rank, node and process of this node's workers.
            rendezvous_s: Time until the nodes had met.
        """
        if not self.writes_events:
            return
        messages, world_size = self._membership.messages, self._membership.world_size
        workers = own_workers + messages.from_others("workers", wait_s=_PEER_START_S)
        facts = {"workers": workers, "world_size": world_size}
        if self._membership.generation == 0:
            self.write("attempt_started", **facts, **self._describe_attempt())
        self.write("rendezvous", seconds=round(rendezvous_s, 3), **facts)
        if (resize := messages.resize_event(world_size)) is not None:
            self.write("resized", **resize)

    def report_not_copied(self, reason: str) -> None:
        """Report that this node's snapshots have no replica on another one."""
        self.write_own("snapshot_not_copied", **self._membership.node.event(), reason=reason)

    def report_losses(self, losses: Sequence[Loss], hangs: Sequence[Hang]) -> None:
        """Report why a generation has ended: lost nodes, hung workers, or lost ones."""
        self.report_lost_nodes()
        for hang in hangs:
            finished = first_cause(losses).step if losses else None
            self.write("worker_hung", **hang.event(), finished_step=finished)
        if hangs:
            return  # the peers that lost contact with it are no news
        lost_nodes = self._membership.lost_nodes
        for loss in causes(losses) if losses else ():
            if not lost_nodes or (loss.signal and loss.is_clear):  # else it followed from that
                self.write("worker_lost", **loss.event())

    def report_lost_nodes(self) -> None:
        """Write down which nodes are gone, each once, where this one is to say it."""
        for node in self._membership.lost_nodes:
            if node.node_rank not in self._reported_lost and self.writes_events:
                self._reported_lost.add(node.node_rank)
                self.write("node_lost", **node.event())

    def begin_generation(self, absent: Sequence[LostNode]) -> list[LostNode]:
        """Report each loss of a node anew; returns the absent nodes whose loss is unreported."""
        unreported = [lost for lost in absent if lost.node_rank not in self._reported_lost]
        self._reported_lost = set()
        return unreported

    def report_store_taken(self, lost_nodes: Sequence[LostNode]) -> None:
        """Report that this node serves the store now, and the losses before.

        Args:
            lost_nodes: Each had the lease of the run when its loss was noticed, as if this node
                were cut off.
        """
        for lost in lost_nodes:
            self.write_own("node_lost", **lost.event())
        self.write_own("store_moved", **self._membership.node.event())

    def report_new_store(self, node_rank: int, endpoint: str) -> None:
        """Report where the store is now, if this node serves it."""
        node = self._membership.node
        if node_rank == node.rank:
            self.write_own("store_moved", **node.event(), endpoint=endpoint)
