"""Where the agents of several nodes meet, and for whom they wait."""

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # built in C++

from shardyard.elastic.rendezvous.c10d import (
    Rendezvous,
    RendezvousConfig,
    RendezvousWait,
    _listener,
    build_rendezvous,
    connect_store,
    serve_store,
    sever,
    wait_for_all,
)
from shardyard.elastic.seal import Seal
from shardyard.io.polling import wait_for


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_node_0_listens_where_the_others_look_for_it(host: str) -> None:
    store = serve_store(host, 0)
    connect_store(host, store.port).set("word", "here")
    assert store.get("word") == b"here"


def listening_at(wanted: int) -> set[str]:
    """Local addresses at which a port is open, in the kernel's hexadecimal form."""
    text = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    fields = [line.split() for line in text.splitlines()]
    ends = [each[1].split(":") for each in fields if each[3] == "0A"]
    return {address for address, port in ends if int(port, 16) == wanted}


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who listens where")
def test_node_0_listens_at_the_address_of_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def getaddrinfo(_host: str, *_: object, **__: object) -> list[object]:
        if not found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr(
        "shardyard.elastic.rendezvous.c10d.is_loopback", lambda host: host == "127.0.1.1"
    )
    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    for found[:], where in [
        (["127.0.0.1"], {"0100007F"}),  # the stand-in for an address of one interface
        (["127.0.1.1"], {"0" * 32}),  # Debian's
        (["127.0.0.1", "127.0.0.3"], {"0" * 32}),
        (["192.0.2.1"], {"0" * 32}),  # of no interface here
        ([], {"0" * 32}),
    ]:
        listener = _listener("node-0", 0)
        store = TCPStore(
            "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        assert listening_at(store.port) == where, found


def never() -> bool:
    return False


def a_meeting(node_rank: int, endpoint: str | None, **other: Any) -> RendezvousConfig:
    """One of two nodes; what dead nodes leave is believed for an hour."""
    return RendezvousConfig(
        id="m", seal=Seal(b"s" * 32), min_nodes=1, max_nodes=2, endpoint=endpoint,
        node_rank=node_rank, join_interval_s=0.0, keep_alive_s=3600, restart_timeout_s=600.0,
        **other,
    )  # fmt: skip


MEETING = a_meeting(0, None)


def test_a_run_waits_for_all_of_its_nodes() -> None:
    store = serve_store("127.0.0.1", 0)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(wait_for_all, MEETING, store, nodes=2, wait_s=60.0, is_over=never)
        time.sleep(0.3)
        assert not first.done()
        other = connect_store("127.0.0.1", store.port)
        wait_for_all(MEETING, other, nodes=2, wait_s=60.0, is_over=never)
        first.result(timeout=10)


def test_the_first_node_waits_so_long_and_a_later_one_not_at_all() -> None:
    store = serve_store("127.0.0.1", 0)
    began_s = time.monotonic()
    wait_for_all(MEETING, store, nodes=3, wait_s=0.3, is_over=never)
    assert time.monotonic() - began_s >= 0.3
    wait_for_all(MEETING, store, nodes=3, wait_s=3600.0, is_over=never)


def test_a_drain_ends_the_wait() -> None:
    store = serve_store("127.0.0.1", 0)
    wait_for_all(MEETING, store, nodes=2, wait_s=3600.0, is_over=lambda: True)


def test_a_node_that_waits_says_for_whom_where_and_until_when() -> None:
    clock = [0.0]
    first = a_meeting(0, "127.0.0.1:0", wait=RendezvousWait(0, now_s=lambda: clock[0]))
    store = serve_store("127.0.0.1", 0)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(wait_for_all, first, store, nodes=2, wait_s=60.0, is_over=never)
        assert wait_for(lambda: first.wait.is_waiting, within_s=60, every_s=0.01)
        assert first.wait.line() is None
        clock[0] = 10.0
        line = first.wait.line() or ""
        store.add("shardyard/arrived", 1)
        waits.result()
    assert line.startswith("node 0 waits for other nodes at 127.0.0.1:0: 1 of 1 to 2 came. It ")
    assert line.endswith(", in 50 s.") and first.wait.line() is None


def test_a_node_that_cannot_reach_the_store_says_where_it_is() -> None:
    clock = [0.0]
    port = serve_store("127.0.0.1", 0).port  # free again at once
    second = a_meeting(1, f"127.0.0.1:{port}", wait=RendezvousWait(1, now_s=lambda: clock[0]))
    with ThreadPoolExecutor() as pool:
        entered = pool.submit(build_rendezvous, second)
        assert wait_for(lambda: second.wait.is_waiting, within_s=60, every_s=0.01)
        clock[0] = 10.0
        line = second.wait.line() or ""
        store = serve_store("127.0.0.1", port)
        entered.result()[0].shutdown()
    assert line.startswith(f"node 1 waits for the agent of node 0 at 127.0.0.1:{port}. It gives up")
    del store


@pytest.fixture
def pair() -> Iterator[list[Rendezvous]]:
    """Two nodes, of which one is enough."""

    port = serve_store("127.0.0.1", 0).port  # free again at once
    nodes = [build_rendezvous(a_meeting(rank, f"127.0.0.1:{port}"))[0] for rank in range(2)]
    yield nodes
    for node in nodes:
        node.shutdown()


@pytest.mark.heavy
def test_a_node_that_is_forgotten_is_not_waited_for(pair: list[Rendezvous]) -> None:
    with ThreadPoolExecutor() as pool:
        met = list(pool.map(Rendezvous.next_rendezvous, pair))
    left, gone = pair
    assert [each.world_size for each in met] == [2, 2]
    gone._stop_heartbeats()  # as if it were killed
    left.forget([met[1].rank], round=left.round)
    began_s = time.monotonic()
    assert left.next_rendezvous().world_size == 1
    assert time.monotonic() - began_s < 120.0  # not 3600, also on a busy machine


@pytest.mark.heavy
def test_a_node_that_leaves_is_not_waited_for_sees_the_others_and_closes_nothing_for_them(
    pair: list[Rendezvous],
) -> None:
    left, other = pair  # which serves the store, and goes on serving it
    with ThreadPoolExecutor() as pool:
        met = list(pool.map(Rendezvous.next_rendezvous, pair))
    left.leave(met[0].rank)
    assert other.next_rendezvous().world_size == 1
    assert wait_for(left.has_others, within_s=60.0, every_s=0.2)
    assert left.shutdown() and not other.is_closed()
    other.forget([0], round=other.round)  # as if it were killed
    assert wait_for(lambda: not left.has_others(), within_s=60.0, every_s=0.2)


@pytest.mark.heavy
def test_a_node_that_comes_is_told_of_once_it_is_to_be_taken_in(pair: list[Rendezvous]) -> None:
    first, second = pair

    def come() -> int:
        """Meet as an agent does: again if the other was too slow for the last call."""
        alone = second.next_rendezvous().world_size == 1
        return second.next_rendezvous().world_size if alone else 2

    assert first.next_rendezvous().world_size == 1
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(come)
        first.takes_in = False
        assert wait_for(lambda: first.nodes_waiting() == 1, within_s=60.0, every_s=0.2)
        assert first.num_nodes_waiting() == 0
        first.takes_in = True
        assert first.num_nodes_waiting() == 1
        assert first.next_rendezvous().world_size == 2
        assert coming.result() == 2


def test_a_node_that_was_forgotten_too_early_comes_back(pair: list[Rendezvous]) -> None:
    with ThreadPoolExecutor() as pool:
        met = list(pool.map(Rendezvous.next_rendezvous, pair))
        pair[0].forget([met[1].rank], round=pair[0].round)
        pair[0].forget([met[1].rank], round=pair[0].round)
        again = list(pool.map(Rendezvous.next_rendezvous, pair))
    assert [each.world_size for each in again] == [2, 2]


def test_a_call_that_waits_in_a_store_ends_when_its_connection_is_shut_and_no_other_is() -> None:
    store = serve_store("127.0.0.1", 0)
    client = connect_store("127.0.0.1", store.port)
    with (
        socket.create_server(("127.0.0.1", 0)) as elsewhere,
        socket.create_connection(elsewhere.getsockname()) as other,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(client.get, "what nobody says")

        def has_ended() -> bool:
            sever(store.port)
            return waiting.done()

        assert wait_for(has_ended, every_s=0.05, within_s=60.0)
        with pytest.raises(DistError):
            waiting.result()
        assert other.getpeername() == elsewhere.getsockname()
