"""Choice of the node that serves the rendezvous store after the serving node is lost.

The run's lease decides: an agent takes it before it serves. A node that is only cut off from
the others still holds it, so that two halves of a run never train at once.
``attempts/<n>/store.json`` names the place. All nodes need only the run's folder, which they
see already.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # built in C++

from shardyard.elastic.agent_messages import Node
from shardyard.elastic.rendezvous.c10d import (
    connect_store,
    endpoint_of,
    parse_endpoint,
    serve_store,
)
from shardyard.errors import LostNodeError, RequestError
from shardyard.io.polling import wait_for
from shardyard.network_interface import address_towards
from shardyard.rundir.attempt_files import StoreLocation, read_store_location, write_store_location
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease, is_locked
from shardyard.rundir.state import has_attempt_ended

_WITHIN_S = 60.0
"""For a store to be found; network file systems show a new file as late as this."""
_TURN_S = 2.0
"""Head start of each node before the next higher one; the lease decides, not the order."""
_CONNECT = timedelta(seconds=10)
_POLL_S = 0.1


@dataclass
class StoreFailover:
    """One agent's view of where the store is."""

    run: RunDir
    attempt: int
    node_rank: int
    location: StoreLocation
    """Place where it is, or was when it was lost."""
    own_host: str | None = None
    """This node's name, as the others reach it; None: the address from which it reached the lost
    node, whose name may be gone with it."""
    _lease: Lease | None = None

    @property
    def serves(self) -> bool:
        """Whether this agent does."""
        return self.location.node_rank == self.node_rank

    def is_lease_available(self) -> bool:
        """Whether no agent of another node holds the run's lease.

        The agent that serves holds it itself, whichever rank its node has in the group.
        """
        return self.serves or self._lease is not None or not is_locked(self.run.lease)

    def find(self, *, turn: int, is_over: Callable[[], bool]) -> TCPStore | None:
        """Serve the store, or find who does.

        Args:
            turn: How many of the nodes that are left have a lower rank.

        Returns:
            The store; None: there is none, or the attempt is over.
        """
        began_s = time.monotonic()
        while time.monotonic() - began_s < _WITHIN_S and not (is_over() or self.has_ended()):
            is_my_turn = time.monotonic() - began_s >= turn * _TURN_S
            # Follows first: another node may have announced its store by now.
            if store := self._follow() or (self._serve() if is_my_turn else None):
                return store
            time.sleep(_POLL_S)
        return None

    def take_over(self, nodes: Sequence[Node], excluded: Sequence[Node] = ()) -> bool:
        """Take over a lost node's work, except training, where each rendezvous has its own store.

        Args:
            nodes: Nodes of the rendezvous; the first of them takes over.
            excluded: Nodes that do not meet, and are not lost: such a node keeps its work.

        Returns:
            Whether this agent does it from now on.

        Raises:
            LostNodeError: The lost node, or another process, holds the run's lease.
        """
        self.location = read_store_location(self.run, self.attempt) or self.location
        ranks = [node.rank for node in nodes]
        if self.location.node_rank in ranks or ranks[0] != self.node_rank:
            return False
        if self.location.node_rank in [node.rank for node in excluded] and is_locked(
            self.run.lease
        ):
            return False
        if not wait_for(self._take_lease, within_s=_WITHIN_S, every_s=_POLL_S):
            raise LostNodeError(
                f"node {self.location.node_rank} does not reach the others, and {self.run.lease} "
                "is still held. Only this node may be cut off, or the run was started again. Look "
                "at who holds it; two at once would overwrite each other's checkpoints."
            )
        self._write(self.location.endpoint)
        return True

    def _follow(self) -> TCPStore | None:
        place = read_store_location(self.run, self.attempt)
        # The same number of moves names the store that was lost.
        if place is None or place.moves <= self.location.moves:
            return None
        self.location = place
        try:
            return connect_store(*parse_endpoint(place.endpoint), within=_CONNECT)
        except LostNodeError:
            return None  # that node was lost too; another will follow it

    def _serve(self) -> TCPStore | None:
        if not self._take_lease():
            return None  # its holder serves, or is about to leave it
        if self.has_ended():  # its holder wrote so before it left it
            return None
        address = self.own_host or address_towards(*parse_endpoint(self.location.endpoint))
        store = serve_store(address, 0)
        # Announced once it listens: the others give up a connection after 10 s.
        self._write(endpoint_of(address, store.port))
        return store

    def _take_lease(self) -> bool:
        try:
            self._lease = self._lease or Lease(self.run.lease)
        except RequestError:
            return False
        return True

    def _write(self, endpoint: str) -> None:
        self.location = StoreLocation(
            moves=self.location.moves + 1, node_rank=self.node_rank, endpoint=endpoint
        )
        write_store_location(self.run, self.attempt, self.location)

    def has_ended(self) -> bool:
        """Whether a node ended the attempt for all: it was not lost."""
        return has_attempt_ended(self.run, self.attempt)
