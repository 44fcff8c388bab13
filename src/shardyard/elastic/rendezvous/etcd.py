"""Agents that meet in etcd (`elastic.rendezvous: etcd://HOST:2379`): no node is special.

    /shardyard/<meeting>/nodes/<name>        a node that lives: its key vanishes with its lease
    /shardyard/<meeting>/meeting/state       who meets in which round, as sealed JSON (torch's own
                                             is a pickle: any client of etcd could run code here)
    /shardyard/<meeting>/meeting/store/<n>   HOST:PORT of the store of round n, sealed
    /shardyard/<meeting>/meeting/begun       the first rendezvous is complete: no more waiting

The state is that of torch's dynamic rendezvous, changed by compare-and-swap on the revision of
its key. Leases decide which nodes live, so only etcd's clock matters. The agent of rank 0
serves the store of its round, which the workers use too; the next round has another.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # built in C++
    HashStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousTimeout,
)

from shardyard import torch_private
from shardyard.config.endpoints import EtcdEndpoint
from shardyard.elastic.agent_messages import LocalClockBackend
from shardyard.elastic.rendezvous.c10d import (
    LAST_CALL_TIMEOUT,
    Rendezvous,
    RendezvousConfig,
    connect_store,
    have_a_store_each,
    others,
    parse_endpoint,
    serve_store,
)
from shardyard.elastic.rendezvous.etcd_client import (
    Etcd,
    EtcdSilentError,
    KeyValue,
    LeaseEndedError,
    delete,
    delete_all,
    get,
    get_all,
    is_at,
    is_empty,
    put,
)
from shardyard.elastic.rendezvous.state import from_json, is_closed, to_json
from shardyard.elastic.seal import SealedStore
from shardyard.errors import LostNodeError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.io.polling import wait_for
from shardyard.network_interface import address_towards, is_loopback

_ROOT = "/shardyard"
_KEPT_S = 3600
"""Seconds that etcd keeps the data of a rendezvous whose agents were all killed."""
_FIRST_ANSWER_S = 30.0
"""An etcd that starts at the same time as the job."""
_POLL_S = 0.2
_CONNECT = timedelta(seconds=5)
"""For a connection to the store of a node that lives; then it is looked again whether it does."""

log = logging.getLogger(__name__)


class Presence:
    """This node's key in etcd: there as long as this process is."""

    def __init__(self, etcd: Etcd, root: str, *, ttl_s: int) -> None:
        self._etcd = etcd
        self._ttl_s = ttl_s
        self._name = ""
        self._lease = 0
        self._nodes = f"{root}/nodes/"
        # Every node computes the same id: the first one grants the lease, and all keep it.
        digest = hashlib.sha256(root.encode()).digest()
        # Ids of leases are signed 64-bit numbers, and 0 asks etcd for any free one.
        self.rendezvous_lease = int.from_bytes(digest[:8]) >> 1 or 1
        """Lease of the data that all nodes write together: the data expires with it."""
        self.is_reachable = True
        """Whether etcd answered the last sign of life."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="etcd-lease", daemon=True)

    def begin(self, name: str) -> None:
        """Give signs of life under a name until ``end``."""
        self._name = name
        self.renew()
        self._thread.start()

    def renew(self) -> None:
        """Take leases where there are none, and show the node's key."""
        self._etcd.grant_lease(_KEPT_S, self.rendezvous_lease)
        if not self._lease or not self._etcd.keep_lease(self._lease):
            self._lease = self._etcd.grant_lease(self._ttl_s)
        self._etcd.transact([self.sign()])

    def sign(self) -> dict[str, Any]:
        """The operation that shows the node's key; part of all that it writes."""
        return put(f"{self._nodes}{self._name}", b"", lease=self._lease)

    def end(self) -> None:
        """Be gone for the others at once."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._lease:
            self._etcd.end_lease(self._lease)

    def _keep(self) -> None:
        # One renewal may fail, and the next still comes before the lease ends.
        while not self._is_over.wait(self._ttl_s / 3):
            try:
                is_kept = self._etcd.keep_lease(self._lease)
                is_kept &= self._etcd.keep_lease(self.rendezvous_lease)
                if not is_kept:
                    self._replace_lease()
            except (EtcdSilentError, LeaseEndedError, ShardyardError) as error:
                if self.is_reachable:
                    log.warning(
                        "%s. Training continues; nodes can rejoin once etcd answers.", error
                    )
                self.is_reachable = False
                continue
            if not self.is_reachable:
                log.warning("%s answers again", self._etcd)
            self.is_reachable = True

    def _replace_lease(self) -> None:
        log.warning(
            "the lease of this node (%s) in %s has ended: it did not hear from this node for %d "
            "s, or has lost its data. At the next rendezvous the other nodes count this one as "
            "gone; a new lease was taken. If it happens again, raise elastic.keep_alive_s, or "
            "check why this machine or etcd paused.",
            self._name, self._etcd, self._ttl_s,
        )  # fmt: skip
        self.renew()


class EtcdBackend(RendezvousBackend):
    """The state of torch's rendezvous in one key of etcd."""

    def __init__(self, etcd: Etcd, root: str, presence: Presence, config: RendezvousConfig) -> None:
        self._etcd = etcd
        self.seal, self._wait = config.seal, config.wait
        self.presence = presence
        self._nodes = f"{root}/nodes/"
        self._key = f"{root}/meeting/state"
        self._patient_until_s = 0.0

    @property
    def name(self) -> str:
        return "etcd-v3"

    @contextmanager
    def patience(self, for_s: float) -> Iterator[None]:
        """Within the block, wait for an etcd that does not answer."""
        self._patient_until_s = time.monotonic() + for_s
        try:
            yield
        finally:
            self._patient_until_s = 0.0

    def get_state(self) -> tuple[bytes, int] | None:
        """The state and the revision of its key."""
        found = self.patiently(lambda: self._etcd.transact(self._read()))[1]
        return self._decoded(found)

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        """Write the state if no other node has; return the current one, and if we wrote it."""
        written = self.seal.sealed(self._key, to_json(state))

        def swap() -> tuple[bool, list[list[KeyValue]]]:
            return self._etcd.transact(
                [
                    put(self._key, written, lease=self.presence.rendezvous_lease),
                    # In one transaction: if this node's lease has ended, etcd writes nothing.
                    self.presence.sign(),
                    *self._read(),
                ],
                only_if=[is_at(self._key, token or 0)],
                otherwise=self._read(),
            )

        try:
            is_ours, found = self.patiently(swap)
        except LeaseEndedError:  # etcd forgot us, or all it knew
            self.patiently(self.presence.renew)
            is_ours, found = self.patiently(swap)
        # A swap that succeeded answers its two writes first, then the two reads.
        now = self._decoded(found[-2:])
        return None if now is None else (*now, is_ours)

    def is_closed(self) -> bool:
        """Whether the agents that are there are ending."""
        _, (states, _nodes) = self._etcd.transact(self._read())
        return bool(states) and is_closed(self.seal.opened(self._key, states[0].value))

    def patiently(self, ask: Callable[[], Any]) -> Any:
        """Ask, and again as long as there is patience."""
        while True:
            try:
                answer = ask()
            except EtcdSilentError as error:
                self._wait.silence = str(error)
                if time.monotonic() >= self._patient_until_s:
                    raise
                time.sleep(_POLL_S)
            else:
                self._wait.silence = ""
                return answer

    def _read(self) -> list[dict[str, Any]]:
        return [get(self._key), get_all(self._nodes)]

    def _decoded(self, responses: list[list[KeyValue]]) -> tuple[bytes, int] | None:
        states, nodes = responses
        if not states:
            return None
        alive = {node.key.removeprefix(self._nodes) for node in nodes}
        state = self.seal.opened(self._key, states[0].value)
        return from_json(state, alive=alive), states[0].revision


class StoreGoneError(Exception):
    """The node that was to serve the store of a meeting is gone: all meet again without it."""


class EtcdRendezvous(Rendezvous):
    """Torch's rendezvous in etcd; each meeting has a store of its own, that its rank 0 serves."""

    first_serves = True

    def enter(self, etcd: Etcd, root: str, backend: EtcdBackend, address: str) -> None:
        """Take up what the torch half of this class does not know.

        Args:
            address: Of this node, as the others reach it.
        """
        self._etcd, self._root, self._shared, self._address = etcd, root, backend, address
        self._served: TCPStore | None = None
        self._store_address = (address, 0)
        self._ranks: dict[str, int] = {}
        torch_private.set_store_factory(self, self._open_round_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, and wait for an etcd that does not answer as long as for nodes.

        Raises:
            LostNodeError: etcd did not answer for so long.
        """
        patience_s = self.settings.timeout.join.total_seconds()
        try:
            with self._shared.patience(patience_s):
                info = self._next_rendezvous()
        except EtcdSilentError as error:
            raise LostNodeError(
                f"{error}, and has not for {patience_s:.0f} s. Nodes meet there after a loss. See "
                "whether it runs (`etcdctl endpoint health`), then start the job again."
            ) from error
        return RendezvousInfo(
            info.store, info.rank, info.world_size, RendezvousStoreInfo(*self._store_address)
        )

    def nodes_waiting(self) -> int:
        """Return the number of waiting nodes; 0 while etcd is silent, as training needs none."""
        if not self._shared.presence.is_reachable:
            return 0
        try:
            return super().nodes_waiting()
        except EtcdSilentError:
            return 0

    def forget(self, group_ranks: Collection[int], *, round: int) -> None:
        """Have nodes of a round that is over count as gone at once, not when their lease ends."""
        gone = [name for name, rank in self._ranks.items() if rank in group_ranks]
        # The known ranks are of the newest round; in another one they are other nodes.
        if round != self.round or not gone:
            return
        try:
            self._etcd.transact([delete(f"{self._root}/nodes/{name}") for name in gone])
        except EtcdSilentError as error:
            log.warning("%s. Nodes that are gone count as such once their lease ends.", error)

    def leave(self, group_rank: int) -> None:
        """Be gone for the others at once: the node's key vanishes with its lease."""
        super().leave(group_rank)
        with suppress(EtcdSilentError):
            self._shared.presence.end()

    def has_others(self) -> bool:
        """Return whether another node lives; true while etcd is silent, as none is known to be
        gone."""
        try:
            return super().has_others()
        except EtcdSilentError:
            return True

    def shutdown(self) -> bool:
        """Close the meeting, leave it, and tidy up if this node is the last."""
        if self.has_departed:
            return True
        is_closed = super().shutdown()
        with suppress(EtcdSilentError):
            # This order: the data is removed only if no node is left.
            self._shared.presence.end()
            tidy_up(self._etcd, self._root)
        return is_closed

    def wait_for_all(self, *, nodes: int, wait_s: float, is_over: Callable[[], bool]) -> None:
        """Before the first meeting: until all agents are there, or the first has waited enough."""
        begun = f"{self._root}/meeting/begun"
        look = [get_all(f"{self._root}/nodes/"), get(begun)]

        here = 1

        def is_enough() -> bool:
            nonlocal here
            there, has_begun = self._shared.patiently(lambda: self._etcd.transact(look))[1]
            here = len(there)
            return here >= nodes or bool(has_begun) or is_over()

        waiting = self.config.wait.waits_for(lambda: others(self.config, here), within_s=wait_s)
        with self._shared.patience(wait_s + _FIRST_ANSWER_S), waiting:
            wait_for(is_enough, within_s=wait_s, every_s=_POLL_S)
            lease = self._shared.presence.rendezvous_lease
            self._shared.patiently(lambda: self._etcd.transact([put(begun, b"", lease=lease)]))

    def _next_rendezvous(self) -> RendezvousInfo:
        while True:
            try:
                return super().next_rendezvous()
            except StoreGoneError as error:
                log.warning("%s", error)

    def _open_round_store(self) -> SealedStore:
        """Return the store that torch gives to the agents of a complete rendezvous."""
        self._ranks = torch_private.node_ranks(self)
        rank = self._ranks[torch_private.node_name(self)]
        key = f"{self._root}/meeting/store/{self.round}"
        store = self._serve(key) if rank == 0 else self._connect(key)
        return SealedStore(store, "shardyard/round", self._shared.seal)

    def _serve(self, key: str) -> TCPStore:
        # This drops the previous store: all live nodes have left its rendezvous.
        self._served = serve_store(self._address, 0)
        self._store_address = (self._address, self._served.port)
        where = self._shared.seal.sealed(key, json.dumps(self._store_address).encode())
        lease = self._shared.presence.rendezvous_lease
        self._shared.patiently(lambda: self._etcd.transact([put(key, where, lease=lease)]))
        return self._served

    def _connect(self, key: str) -> TCPStore:
        (server,) = (name for name, rank in self._ranks.items() if rank == 0)
        look = [get(key), get(f"{self._root}/nodes/{server}")]
        while True:
            places, alive = self._shared.patiently(lambda: self._etcd.transact(look))[1]
            if places:
                host, port = parse_json(self._shared.seal.opened(key, places[0].value))
                with suppress(LostNodeError):  # of a node that may have died since
                    store = connect_store(host, port, within=_CONNECT)
                    self._served, self._store_address = None, (host, port)
                    return store
            if not alive:
                raise StoreGoneError(f"{server}, which was to serve the store, is gone")
            time.sleep(_POLL_S)


def etcd_rendezvous(config: RendezvousConfig, etcd_endpoint: EtcdEndpoint) -> EtcdRendezvous:
    """Enter a meeting in etcd.

    Raises:
        RequestError: What answers there is no etcd that will do.
        AccessError: etcd does not let this client in.
        LostNodeError: No etcd answers, or the meeting is over and its agents do not end.
    """
    address = _address(config, etcd_endpoint)
    have_a_store_each()
    etcd, root = Etcd(etcd_endpoint), f"{_ROOT}/{config.id}"
    presence = Presence(etcd, root, ttl_s=config.keep_alive_s)
    config = replace(config, location=str(etcd))
    backend = EtcdBackend(etcd, root, presence, config)
    clock = LocalClockBackend(backend, last_call=LAST_CALL_TIMEOUT)
    handler: EtcdRendezvous = EtcdRendezvous.from_backend(
        config.id,
        HashStore(),  # never used: each round has its own
        clock,
        config.min_nodes,
        config.max_nodes,
        local_addr=address,
        timeout=RendezvousTimeout(
            join=timedelta(seconds=config.restart_timeout_s + config.join_interval_s),
            last_call=LAST_CALL_TIMEOUT,
        ),
        keep_alive_interval=_KEPT_S,  # leases say who lives
    )
    handler.local_clock, handler.seal, handler.config = clock, config.seal, config
    handler.enter(etcd, root, backend, address)
    try:
        waiting = config.wait.waits_for(lambda: f"an answer of {etcd}", within_s=_FIRST_ANSWER_S)
        with backend.patience(_FIRST_ANSWER_S), waiting:
            backend.patiently(lambda: _wait_for_closed_rendezvous(etcd, root, backend, config))
            backend.patiently(lambda: presence.begin(torch_private.node_name(handler)))
    except EtcdSilentError as error:
        raise LostNodeError(
            f"{error}. All agents meet there (elastic.rendezvous). Check that it runs, that its "
            "address is right and that its port is open to this node."
        ) from error
    return handler


def tidy_up(etcd: Etcd, root: str) -> None:
    """Remove what a meeting has left, unless a node of it lives."""
    etcd.transact([delete_all(f"{root}/meeting/")], only_if=[is_empty(f"{root}/nodes/")])


def _wait_for_closed_rendezvous(
    etcd: Etcd, root: str, backend: EtcdBackend, config: RendezvousConfig
) -> None:
    """A run with the name of an earlier one must not find the meeting of that, which is closed."""

    def is_open() -> bool:
        tidy_up(etcd, root)
        return not backend.is_closed()

    # Agents that were killed count as alive until their leases end, keep_alive_s later.
    if not wait_for(is_open, within_s=2.0 * config.keep_alive_s, every_s=_POLL_S):
        raise LostNodeError(
            f"the agents of {config.id} in {etcd} are ending, and this node came too late to join "
            "them. Start the job again once they have."
        )


def _address(config: RendezvousConfig, etcd_endpoint: EtcdEndpoint) -> str:
    """Return the address from which this node reaches etcd; others mostly reach it there too."""
    found = address_towards(*etcd_endpoint.endpoints[0])
    if not is_loopback(found) or config.endpoint is None:
        return found
    host, port = parse_endpoint(config.endpoint)  # etcd is on this very machine
    return host if config.node_rank == 0 else address_towards(host, port)
