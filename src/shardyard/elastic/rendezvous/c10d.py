"""Rendezvous of all nodes' agents over a TCP store on node 0, and messages about a node's wait.

It is torch's c10d rendezvous. One node and many use the same code. On one node the store listens on
loopback only. A message comes after some seconds of waiting, then ever more seldom.
"""

import errno
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # built in C++
    DistError,
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from shardyard import torch_private
from shardyard.elastic.agent_messages import LocalClockBackend
from shardyard.elastic.seal import Seal, SealedStore
from shardyard.elastic.store_backend import StoreBackend
from shardyard.errors import LostNodeError, RequestError
from shardyard.io.polling import wait_for
from shardyard.network_interface import OWN_STORE, address_towards, check_loopback, is_loopback

_FIRST_S = 5.0
"""Nodes of one job come seconds after each other."""
_LONGEST_S = 300.0
"""Between two lines."""


class RendezvousWait:
    """One node's wait: its agent begins it, and another thread reads and reports it.

    Args:
        node_rank: Rank of this node.
        now_s: A monotonic clock.
    """

    def __init__(self, node_rank: int, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._node_rank, self._now_s = node_rank, now_s
        self._what: Callable[[], str] | None = None
        self._until_s = 0.0
        self._next_s, self._pause_s = 0.0, _FIRST_S
        self.silence = ""
        """Service that does not answer, and why; empty: all answer."""

    @contextmanager
    def waits_for(self, what: Callable[[], str], *, within_s: float) -> Iterator[None]:
        """Within the block this node waits for something, at most so long."""
        now_s = self._now_s()
        self._until_s = now_s + within_s
        self._next_s, self._pause_s = now_s + _FIRST_S, _FIRST_S
        self._what = what
        try:
            yield
        finally:
            self._what, self.silence = None, ""

    @property
    def is_waiting(self) -> bool:
        """Whether this node waits for something now."""
        return self._what is not None

    def line(self) -> str | None:
        """Return the message that is due; None: there is none, or too little time has passed."""
        what, now_s = self._what, self._now_s()
        if what is None or now_s < self._next_s:
            return None
        self._pause_s = min(_LONGEST_S, 2 * self._pause_s)
        self._next_s = now_s + self._pause_s
        left_s = max(0.0, self._until_s - now_s)
        until = datetime.now().astimezone() + timedelta(seconds=left_s)
        silence = f" {self.silence}." if self.silence else ""
        return (
            f"node {self._node_rank} waits for {what()}.{silence} It gives up at "
            f"{until:%H:%M:%S}, in {left_s:.0f} s."
        )


_LOOPBACK = "127.0.0.1"
_OPERATION = timedelta(seconds=300)
"""For one question to the store, as torch has it."""
LAST_CALL_TIMEOUT = timedelta(seconds=3)
"""Wait for unknown nodes once the fewest are there; torch's 30 s would be paid often."""
_LOOK_S = 0.2
"""Between two looks at who has come: a meeting takes two or three."""
_SELDOM_S = 1.0
"""Between two looks while workers train, as torch has it."""

_BEATS = 3
"""Signs of life that a node may miss."""
_ARRIVAL_POLL_S = 0.1
_FORGET_TRIES = 10
"""Each fails only if another node changed the state in between."""


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """Rendezvous of one attempt: its nodes and its place."""

    id: str
    """Fresh for every attempt: a closed rendezvous cannot be entered again."""
    seal: Seal
    """Marks what the nodes of the attempt write."""
    min_nodes: int
    max_nodes: int
    endpoint: str | None
    """HOST:PORT of node 0; None: one node, any free port of the loopback interface."""
    node_rank: int
    location: str = ""
    """Rendezvous place to show to users where it is not node 0: etcd."""
    keep_alive_s: int
    """Seconds that others wait for a node's next heartbeat, each by its own clock."""
    restart_timeout_s: float
    """Longest wait for the others."""
    join_interval_s: float = 0.0
    """Between two resizes for nodes that came meanwhile."""
    serving_rank: int = 0
    """The node whose agent serves the store."""
    wait: RendezvousWait = field(default_factory=lambda: RendezvousWait(0), compare=False)
    """Wait of this node, as its messages describe it."""

    @property
    def serves(self) -> bool:
        """Whether this agent does."""
        return self.node_rank == self.serving_rank


class Rendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous, which also accepts reports that nodes are gone.

    Torch itself notices by a heartbeat that does not change any more. Until then the remaining
    nodes may not begin without them.
    """

    first_serves = False
    """Whether the agent of rank 0 serves the store of a meeting; else that of node 0 has it."""
    takes_in = True
    """Whether to report waiting nodes; until then this node's workers continue."""
    has_departed = False
    """Whether the others meet without this node."""
    local_clock: LocalClockBackend
    """By which it tells times."""
    seal: Seal
    """Marks what the nodes of the attempt write."""
    config: RendezvousConfig
    """Rendezvous of the attempt."""

    def num_nodes_waiting(self) -> int:
        """Nodes that came since the last meeting, as torch asks for them."""
        return self.nodes_waiting() if self.takes_in else 0

    def nodes_waiting(self) -> int:
        """The same, whether or not they are taken in yet."""
        return int(super().num_nodes_waiting())

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet."""
        torch_private.set_rendezvous_poll_interval(self, _LOOK_S)
        within_s = self.settings.timeout.join.total_seconds()
        try:
            with self.config.wait.waits_for(self._others, within_s=within_s):
                return super().next_rendezvous()
        finally:
            torch_private.set_rendezvous_poll_interval(self, _SELDOM_S)

    def _others(self) -> str:
        return others(self.config, max(1, len(torch_private.node_ranks(self))))

    def expect(self, remaining: int) -> None:
        """Have the next meeting end once all are there that live, and those that wait to come in.

        Args:
            remaining: Nodes of the last meeting that live.
        """
        self.local_clock.expected = remaining + self.nodes_waiting()

    @property
    def round(self) -> int:
        """The number of the newest meeting that this node knows of."""
        return torch_private.rendezvous_round(self)

    def forget(self, group_ranks: Collection[int], *, round: int) -> None:
        """Have nodes of a round that is over count as gone at once; safe to repeat, by any node."""
        torch_private.forget_nodes(
            self, group_ranks, round_number=round, max_attempts=_FORGET_TRIES
        )

    def leave(self, group_rank: int) -> None:
        """Leave the others at once; they continue to meet here, maybe at this node's store.

        Args:
            group_rank: Group rank of this node.
        """
        self.has_departed = True
        torch_private.stop_heartbeats(self)
        self.forget([group_rank], round=self.round)

    def has_others(self) -> bool:
        """Whether any other node has given a sign of life of late."""
        return bool(torch_private.other_participants(self))

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes; a node that has left it leaves it open."""
        return self.has_departed or bool(super().shutdown())


def build_rendezvous(
    config: RendezvousConfig, store: TCPStore | None = None
) -> tuple[Rendezvous, TCPStore]:
    """Serve the store or connect to it.

    Args:
        store: One that is open already.

    Returns:
        The handler and the store. Workers use that store too (`worker_store`). The one that
        torch would create in addition lives through restarts, where workers find the addresses
        of dead peers in it (torch 2.13). It also listens on all interfaces, and is not
        announced to nodes that come later.

    Raises:
        RequestError: The endpoint is no HOST:PORT, is missing, or its port is in use.
        LostNodeError: Node 0 does not answer.
    """
    host, port = _endpoint(config)
    if is_loopback(host):
        # Without a loopback interface torch's store retries for 150 s and prints nothing.
        check_loopback()
    have_a_store_each()
    if store is None and config.serves:
        store = serve_store(host, port)
    elif store is None:
        whom = f"the agent of node {config.serving_rank} at {endpoint_of(host, port)}"
        with config.wait.waits_for(lambda: whom, within_s=_OPERATION.total_seconds()):
            store = connect_store(host, port)
    clock = LocalClockBackend(
        StoreBackend(store, config.id, config.seal), last_call=LAST_CALL_TIMEOUT
    )
    handler = Rendezvous.from_backend(
        config.id,
        store,
        clock,
        config.min_nodes,
        config.max_nodes,
        # torch would take socket.getfqdn(), which other nodes may not resolve.
        local_addr=host if config.serves else address_towards(host, port),
        timeout=RendezvousTimeout(
            # A node that comes just after a resize waits for the whole next interval.
            join=timedelta(seconds=config.restart_timeout_s + config.join_interval_s),
            last_call=LAST_CALL_TIMEOUT,
        ),
        keep_alive_interval=max(1, config.keep_alive_s // _BEATS),
        keep_alive_max_attempt=_BEATS,
    )
    handler.local_clock, handler.seal, handler.config = clock, config.seal, config
    # A strong reference would be a cycle, in which handler and store outlive their last user.
    me = weakref.proxy(handler)
    # Each round has its own keys, because old ones hold the addresses of dead peers.
    torch_private.set_store_factory(
        handler, lambda: SealedStore(store, f"shardyard/round/{me.round}", config.seal)
    )
    return handler, store


def have_a_store_each() -> None:
    """Have torch's agent in this process make no store next to the one of the meeting."""
    os.environ.update(OWN_STORE)


def others(config: RendezvousConfig, arrived: int) -> str:
    """Whom a node waits for, in words.

    Args:
        arrived: Nodes that have come, this one among them.
    """
    fewest, most = config.min_nodes, config.max_nodes
    wanted = f"{most}" if fewest == most else f"{fewest} to {most}"
    where = config.location or config.endpoint or "this machine"
    return f"other nodes at {where}: {arrived} of {wanted} came"


def wait_for_all(
    config: RendezvousConfig,
    store: TCPStore,
    *,
    nodes: int,
    wait_s: float,
    is_over: Callable[[], bool],
) -> None:
    """Before the first meeting: wait until all agents are there, or the first has waited enough.

    Torch itself begins with the fewest nodes that will do, and a node that comes a moment later
    costs all the others a restart. Who comes when a run has begun does not wait.
    """
    store.add("shardyard/arrived", 1)

    there = 1

    def is_enough() -> bool:
        nonlocal there
        there = store.add("shardyard/arrived", 0)
        return there >= nodes or is_over() or bool(store.check(["shardyard/begun"]))

    with config.wait.waits_for(lambda: others(config, there), within_s=wait_s):
        wait_for(is_enough, within_s=wait_s, every_s=_ARRIVAL_POLL_S)
    store.set("shardyard/begun", "")


def worker_store(host: str, port: int, generation: int) -> PrefixStore:
    """Return the store by which workers of one generation find each other.

    It is node 0's store with fresh keys.
    """
    return PrefixStore(f"shardyard/generation/{generation}", connect_store(host, port))


def serve_store(host: str, port: int) -> TCPStore:
    """Serve a TCP store in this process; port 0 takes a free one.

    It listens only at the address of ``host``, by which this process and its workers reach it
    too. Where that name has several addresses here or none of this machine, it listens on all
    interfaces; then they reach it by the loopback interface.
    """
    try:
        listener = _listener(host, port)
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error}"
        raise RequestError(
            f"port {port} on {host} {why}. The agents of all nodes meet there. Choose a free one "
            f"with --rendezvous HOST:PORT, or find its holder with `ss -ltnp 'sport = :{port}'`."
        ) from error
    address, port = listener.getsockname()[:2]
    own = _LOOPBACK if address in ("::", "0.0.0.0") else address
    # torch's own listener would be open on all interfaces, so the store gets this one.
    return TCPStore(
        own, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int, *, within: timedelta = _OPERATION) -> TCPStore:
    """A connection to the store that another agent serves."""
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=within)
        # The constructor's timeout is for the connection; later questions may wait longer.
        store.set_timeout(_OPERATION)
        return store
    except DistError as error:
        raise LostNodeError(
            f"no agent answers at {host}:{port} ({str(error).splitlines()[0]}). All agents meet "
            "there. Check that the agent of node 0 runs and that the port is open to this node."
        ) from error


def sever(port: int) -> None:
    """End this process's connections to a store that does not answer, to end waits there.

    Where the other machine is gone without a word, a call of the store waits as long as the
    kernel retries, a quarter of an hour. The store has no name for a connection. An agent has
    no other connections to such a port.
    """
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # no socket, or closed by now
            # A duplicate shares the connection; torch's own descriptor stays open.
            descriptor = os.dup(int(entry.name))
            try:
                _shut(descriptor, port)
            finally:
                os.close(descriptor)


def _shut(descriptor: int, port: int) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    end = socket.socket(fileno=descriptor)
    try:
        if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
            end.shutdown(socket.SHUT_RDWR)
    finally:
        end.detach()


def _listener(host: str, port: int) -> socket.socket:
    address = _only_address(host)
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or is_loopback(host):
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _only_address(host: str) -> str | None:
    """The address of this machine under a name; None: it has several, or Debian's 127.0.1.1."""
    if host == "localhost":
        return _LOOPBACK
    if is_loopback(host):  # 127.0.0.2 is another place than 127.0.0.1
        return host
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    address = found.pop()
    return None if found or is_loopback(address) else address


def _endpoint(config: RendezvousConfig) -> tuple[str, int]:
    if config.endpoint is None:
        if config.max_nodes == 1:
            return _LOOPBACK, 0
        raise RequestError(
            f"{config.max_nodes} nodes need a place to meet. Start the agent of each node with "
            "--rendezvous HOST:PORT (an address of node 0) and --node-rank K."
        )
    return parse_endpoint(config.endpoint)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        RequestError: It is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(
            f"--rendezvous {endpoint} is not HOST:PORT. Agents meet at a port of node 0. "
            "Give for example node0.cluster:29400."
        )
    return host.strip("[]"), int(port)


def endpoint_of(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
