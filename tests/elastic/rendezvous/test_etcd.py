"""Agents that meet in a real etcd of Debian's, started without its API of version 2."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from shardyard.config.endpoints import EtcdEndpoint
from shardyard.elastic.rendezvous.c10d import RendezvousConfig, RendezvousWait, others
from shardyard.elastic.rendezvous.etcd import EtcdRendezvous, etcd_rendezvous
from shardyard.elastic.rendezvous.etcd_client import Etcd, EtcdSilentError, get, is_at, put
from shardyard.elastic.seal import Seal
from shardyard.errors import AccessError, LostNodeError, RequestError
from shardyard.io.polling import wait_for
from tests.debian_packages import need
from tests.elastic.etcd_server import EtcdServer, running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One that no test ends."""
    need("etcd-server", "etcd-client")
    with running(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdServer]:
    """One that a test may kill."""
    need("etcd-server", "etcd-client")
    with running(tmp_path / "etcd") as server:
        yield server


def enter(
    server: EtcdServer, name: str, *, fewest: int = 1, most: int = 2, keep_alive_s: int = 3600
) -> EtcdRendezvous:
    """A node that comes to a meeting; what dead nodes leave is believed for an hour."""
    meeting = RendezvousConfig(
        id=name, seal=Seal(b"s" * 32), min_nodes=fewest, max_nodes=most, endpoint=None, node_rank=0,
        keep_alive_s=keep_alive_s, restart_timeout_s=120.0,
    )  # fmt: skip
    return etcd_rendezvous(meeting, server.place)


def meet(*nodes: EtcdRendezvous) -> list[RendezvousInfo]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(EtcdRendezvous.next_rendezvous, nodes))


def die(node: EtcdRendezvous) -> None:
    """As if it were killed: nothing is said any more, and its lease is not kept."""
    node._shared.presence._is_over.set()
    node._served = None


@pytest.mark.heavy
def test_two_nodes_meet_and_share_the_store_that_the_first_serves(shared: EtcdServer) -> None:
    nodes = [enter(shared, "two") for _ in range(2)]
    met = meet(*nodes)
    assert sorted(each.rank for each in met) == [0, 1]
    assert {each.world_size for each in met} == {2}
    assert met[0].bootstrap_store_info == met[1].bootstrap_store_info
    met[0].store.set("word", "here")
    assert met[1].store.get("word") == b"here"
    key = "/shardyard/two/meeting/state"
    found = shared.etcdctl("get", "--print-value-only", key).rstrip("\n").encode()
    state = json.loads(Seal(b"s" * 32).opened(key, found))
    assert state["complete"] and len(state["participants"]) == 2
    for node in nodes:
        node.shutdown()
    assert not [key for key in shared.left() if key.startswith("/shardyard/two/")]


@pytest.mark.heavy
def test_a_run_of_the_same_name_meets_again_at_once(shared: EtcdServer) -> None:
    for _ in range(2):
        node = enter(shared, "again", most=1)
        assert node.next_rendezvous().world_size == 1
        node.shutdown()


@pytest.mark.system
def test_a_meeting_that_is_ending_is_waited_for_and_not_joined(shared: EtcdServer) -> None:
    first = enter(shared, "ending", most=1)
    first.next_rendezvous()
    first.set_closed()
    with pytest.raises(LostNodeError, match=r"agents of ending .* are ending, and this node came"):
        enter(shared, "ending", most=1, keep_alive_s=0)  # waits for nobody
    threading.Timer(0.5, first.shutdown).start()
    second = enter(shared, "ending", most=1)
    assert second.next_rendezvous().world_size == 1
    second.shutdown()


@pytest.mark.system
def test_those_that_are_left_meet_without_one_that_is_forgotten(shared: EtcdServer) -> None:
    nodes = [enter(shared, "left") for _ in range(2)]
    met = meet(*nodes)
    serving, other = sorted(nodes, key=lambda node: met[nodes.index(node)].rank)
    die(serving)
    other.forget([0], round=other.round)
    info = other.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("served", "here")
    other.shutdown()


@pytest.mark.system
def test_those_that_are_left_meet_without_one_that_leaves(shared: EtcdServer) -> None:
    nodes = [enter(shared, "leaves") for _ in range(2)]
    met = meet(*nodes)
    leaving, other = sorted(nodes, key=lambda node: met[nodes.index(node)].rank)
    leaving.leave(0)
    assert other.next_rendezvous().world_size == 1
    assert wait_for(leaving.has_others, within_s=60.0, every_s=0.2)
    assert leaving.shutdown() and not other.is_closed()
    other.shutdown()
    assert wait_for(lambda: not leaving.has_others(), within_s=60.0, every_s=0.2)
    assert not [key for key in shared.left() if key.startswith("/shardyard/leaves/")]


@pytest.mark.system
def test_a_node_whose_lease_ends_is_gone(shared: EtcdServer) -> None:
    nodes = [enter(shared, "lease", keep_alive_s=3) for _ in range(2)]
    met = meet(*nodes)
    serving, other = sorted(nodes, key=lambda node: met[nodes.index(node)].rank)
    die(serving)
    assert other.next_rendezvous().world_size == 1
    other.shutdown()


@pytest.mark.system
def test_a_node_that_was_forgotten_too_early_comes_back(shared: EtcdServer) -> None:
    nodes = [enter(shared, "early", fewest=2) for _ in range(2)]
    meet(*nodes)
    nodes[0].forget([0, 1], round=nodes[0].round)
    assert [each.world_size for each in meet(*nodes)] == [2, 2]
    for node in nodes:
        node.shutdown()


@pytest.mark.system
def test_a_node_that_comes_later_is_seen(shared: EtcdServer) -> None:
    first = enter(shared, "later")
    first.next_rendezvous()
    late = enter(shared, "later")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(late.next_rendezvous)
        assert wait_for(lambda: first.nodes_waiting() == 1, within_s=60, every_s=0.1)
        assert first.next_rendezvous().world_size == 2
        assert waiting.result().world_size == 2
    for node in (first, late):
        node.shutdown()


@pytest.mark.system
def test_all_nodes_are_waited_for_before_the_first_meeting(shared: EtcdServer) -> None:
    first = enter(shared, "all")
    with ThreadPoolExecutor() as pool:
        wait: dict[str, Any] = {"nodes": 2, "wait_s": 3600.0, "is_over": lambda: False}
        waits = pool.submit(first.wait_for_all, **wait)
        assert not wait_for(waits.done, within_s=0.5, every_s=0.1)
        second = enter(shared, "all")
        waits.result()
    assert others(second.config, 1).startswith("other nodes at etcd at 127.0.0.1:")
    second.wait_for_all(nodes=3, wait_s=3600.0, is_over=lambda: False)  # it has begun
    for node in (first, second):
        node.shutdown()


@pytest.mark.heavy
def test_of_two_that_write_at_once_one_has_to_read_again(shared: EtcdServer) -> None:
    etcd = Etcd(shared.place, {})
    lease = etcd.grant_lease(60)

    def swap(value: bytes) -> tuple[bool, Any]:
        return etcd.transact(
            [put("/x", value, lease=lease)], only_if=[is_at("/x", 0)], otherwise=[get("/x")]
        )

    assert swap(b"first")[0]
    is_done, ((entry,),) = swap(b"second")
    assert not is_done and entry.value == b"first"
    etcd.end_lease(lease)
    assert etcd.transact([get("/x")])[1] == [[]]
    assert not etcd.keep_lease(lease)


@pytest.mark.system
def test_an_etcd_that_is_killed_and_comes_back_loses_nobody(own: EtcdServer) -> None:
    nodes = [enter(own, "outage", fewest=2, keep_alive_s=3) for _ in range(2)]
    meet(*nodes)
    own.kill()
    presences = [node._shared.presence for node in nodes]
    assert wait_for(lambda: not any(p.is_reachable for p in presences), within_s=60, every_s=0.1)
    assert [node.nodes_waiting() for node in nodes] == [0, 0]
    with ThreadPoolExecutor() as pool:
        meets = [pool.submit(node.next_rendezvous) for node in nodes]
        assert not wait_for(lambda: any(m.done() for m in meets), within_s=0.5, every_s=0.1)
        assert "does not answer" in nodes[0].config.wait.silence
        own.start()
        assert [each.result().world_size for each in meets] == [2, 2]
    assert wait_for(lambda: all(p.is_reachable for p in presences), within_s=60, every_s=0.1)
    for node in nodes:
        node.shutdown()
    assert own.left() == []


@pytest.mark.system
def test_an_etcd_that_comes_back_empty_is_told_all_again(own: EtcdServer) -> None:
    nodes = [enter(own, "empty", fewest=2, keep_alive_s=3) for _ in range(2)]
    meet(*nodes)
    own.kill()
    own.empty()
    own.start()
    assert [each.world_size for each in meet(*nodes)] == [2, 2]
    for node in nodes:
        node.shutdown()


def test_no_etcd_is_told_with_where_and_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.elastic.rendezvous.etcd._FIRST_ANSWER_S", 0.0)
    meeting = RendezvousConfig(
        id="m", seal=Seal(b"s" * 32), min_nodes=1, max_nodes=1, endpoint=None, node_rank=0,
        keep_alive_s=3, restart_timeout_s=60.0,
    )  # fmt: skip
    words = r"etcd at 127\.0\.0\.1:1 does not answer .*Check that it runs, that its address"
    with pytest.raises(LostNodeError, match=words):
        etcd_rendezvous(meeting, EtcdEndpoint((("127.0.0.1", 1),), is_encrypted=False))


def test_a_node_that_waits_for_a_silent_etcd_says_what_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardyard.elastic.rendezvous.etcd._FIRST_ANSWER_S", 1.0)
    clock, lines = [0.0], [""]
    meeting = RendezvousConfig(
        id="m", seal=Seal(b"s" * 32), min_nodes=1, max_nodes=1, endpoint=None, node_rank=0,
        keep_alive_s=3, restart_timeout_s=60.0, wait=RendezvousWait(0, now_s=lambda: clock[0]),
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        place = EtcdEndpoint((("127.0.0.1", 1),), is_encrypted=False)
        entered = pool.submit(etcd_rendezvous, meeting, place)

        def is_named() -> bool:
            clock[0] += 1000.0
            lines.append(meeting.wait.line() or "")
            return "does not answer" in lines[-1]

        assert wait_for(is_named, within_s=60, every_s=0.01)
        with pytest.raises(LostNodeError):
            entered.result()
    where = r"etcd at 127\.0\.0\.1:1"
    words = rf"node 0 waits for an answer of {where}\. {where} does not answer \(.*\)\. It gives up"
    assert re.match(words, lines[-1])


@pytest.mark.system
def test_who_has_no_password_is_refused_and_who_has_one_meets(own: EtcdServer) -> None:
    own.etcdctl("user", "add", "root:r")
    own.etcdctl("user", "grant-role", "root", "root")
    own.etcdctl("role", "add", "runs")
    own.etcdctl("role", "grant-permission", "runs", "readwrite", "--prefix", "/shardyard/")
    own.etcdctl("user", "add", "ann:s3cret")
    own.etcdctl("user", "grant-role", "ann", "runs")
    own.etcdctl("auth", "enable")
    with pytest.raises(AccessError, match="rejected a client without user"):
        enter(own, "closed")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("ETCDCTL_USER", "ann")
        environ.setenv("ETCDCTL_PASSWORD", "wrong")
        with pytest.raises(AccessError, match="rejected user ann"):
            enter(own, "closed")
        environ.setenv("ETCDCTL_PASSWORD", "s3cret")
        node = enter(own, "closed")
        assert node.next_rendezvous().world_size == 1
        node.shutdown()


@pytest.mark.system
def test_with_tls_only_an_authority_that_is_named_is_trusted(tmp_path: Path) -> None:
    need("etcd-server", "openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "2", "-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(key), "-out", str(certificate),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    options = ["--cert-file", str(certificate), "--key-file", str(key)]
    with running(tmp_path / "etcd", *options, scheme="https") as server:
        with pytest.raises(RequestError, match=r"TLS with etcd .* failed .*CERTIFICATE_VERIFY_FAI"):
            enter(server, "tls")
        in_the_clear = EtcdEndpoint(server.place.endpoints, is_encrypted=False)
        with pytest.raises(EtcdSilentError, match=r"without an answer; one with TLS does so"):
            Etcd(in_the_clear, {}).transact([get("x")])
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("ETCDCTL_CACERT", str(certificate))
            node = enter(server, "tls")
            assert node.next_rendezvous().world_size == 1
            node.shutdown()
