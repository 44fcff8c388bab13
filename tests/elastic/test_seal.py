"""Values in a store that others can write too."""

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # built in C++
    HashStore,
    TCPStore,
    distributed_c10d,
)

from shardyard.elastic.rendezvous.c10d import (
    Rendezvous,
    RendezvousConfig,
    build_rendezvous,
    serve_store,
)
from shardyard.elastic.seal import Seal, SealedStore, UntrustedValueError, seal_objects
from shardyard.elastic.store_backend import StoreBackend
from shardyard.errors import StorageError
from shardyard.rundir.attempt_files import run_secret
from shardyard.rundir.layout import RunDir
from shardyard.torch_private import empty_rendezvous_state

SEAL, OTHER = Seal(b"s" * 32), Seal(b"o" * 32)


class Runs:
    """Code of a stranger, in a pickle."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def state(round_number: int) -> bytes:
    content = empty_rendezvous_state()
    content.round = round_number
    return pickle.dumps(content)


def round_of(found: Any) -> int:
    return int(pickle.loads(found[0]).round)


def test_a_value_opens_under_its_name_and_secret_alone() -> None:
    value = SEAL.sealed("a", b"content")
    assert SEAL.opened("a", value) == b"content"
    for seal, name, seen in [
        (OTHER, "a", value), (SEAL, "b", value), (SEAL, "a", value[:-1] + b"x"),
        (SEAL, "a", b""), (SEAL, "a", b"content"), (SEAL, "a", b"\xff\x00 content"),
    ]:  # fmt: skip
        with pytest.raises(UntrustedValueError, match="not written by a node of this run"):
            seal.opened(name, seen)
    assert "s" * 8 not in repr(SEAL) and SEAL.derived("x") not in (SEAL.secret, SEAL.derived("y"))


def test_a_value_of_one_meeting_is_none_of_the_next() -> None:
    store = HashStore()
    SealedStore(store, "round/1", SEAL).set("key", "first")
    store.set("round/2/key", store.get("round/1/key").decode())
    assert SealedStore(store, "round/1", SEAL).get("key") == b"first"
    later = SealedStore(store, "round/2", SEAL)
    with pytest.raises(UntrustedValueError):
        later.get("key")
    with pytest.raises(UntrustedValueError):
        later.multi_get(["key"])


@pytest.fixture
def store() -> TCPStore:
    return serve_store("127.0.0.1", 0)


def only_key(backend: StoreBackend) -> str:
    return backend._key


def test_a_state_is_read_as_it_was_written_and_one_of_two_writers_wins(store: TCPStore) -> None:
    one, two = (StoreBackend(store, "m", SEAL) for _ in range(2))
    found = one.get_state()
    assert found is not None and round_of(found) == 0
    first = one.set_state(state(4), found[1])
    late = two.set_state(state(9), found[1])
    assert first is not None and late is not None
    assert (first[2], late[2]) == (True, False)
    assert round_of(late) == 4 and round_of(two.set_state(state(5), late[1])) == 5


@pytest.mark.parametrize(
    "attack", ["pickle", "empty", "bytes", "removed", "older", "of another run", "as torch has it"]
)
def test_what_a_stranger_makes_of_the_state_is_neither_run_nor_used_and_is_put_right(
    store: TCPStore, tmp_path: Path, attack: str
) -> None:
    mark = tmp_path / "mark"
    code = pickle.dumps(Runs(mark), 2)
    backend = StoreBackend(store, "m", SEAL)
    key = only_key(backend)
    found = backend.get_state()
    assert found is not None
    older = backend.set_state(state(1), found[1])
    assert older is not None
    newer = backend.set_state(state(2), older[1])
    assert newer is not None and newer[2]
    match attack:
        case "pickle":
            store.set(key, code.hex())
        case "empty":
            store.set(key, "")
        case "bytes":
            store.set(key, b"\xff\xfe" + code)  # type: ignore[arg-type]
        case "removed":
            store.delete_key(key)
        case "older":
            store.set(key, older[1].decode())
        case "of another run":
            store.set(key, OTHER.sealed(key, SEAL.opened(key, newer[1])).decode())
        case "as torch has it":
            store.set("torch.rendezvous.m", code.hex())
    seen = backend.get_state()
    assert seen is not None and round_of(seen) == 2
    written = backend.set_state(state(3), newer[1])  # its token is no more the value there
    assert written is not None
    if not written[2]:
        written = backend.set_state(state(3), written[1])
    assert written is not None and written[2]
    assert round_of(StoreBackend(store, "m", SEAL).get_state()) == 3
    assert not mark.exists()


@pytest.fixture
def pair() -> Iterator[list[Rendezvous]]:
    port = serve_store("127.0.0.1", 0).port  # free again at once
    nodes = []
    for rank in range(2):
        meeting = RendezvousConfig(
            id="m", seal=SEAL, min_nodes=2, max_nodes=2, endpoint=f"127.0.0.1:{port}",
            node_rank=rank, keep_alive_s=3600, restart_timeout_s=60.0,
        )  # fmt: skip
        nodes.append(build_rendezvous(meeting)[0])
    yield nodes
    for node in nodes:
        node.shutdown()


@pytest.mark.heavy
def test_two_nodes_meet_though_a_stranger_writes_to_their_store(
    pair: list[Rendezvous], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    backend = pair[0].local_clock._backend
    assert isinstance(backend, StoreBackend)
    stranger = backend._store

    with ThreadPoolExecutor() as pool:
        met = [pool.submit(Rendezvous.next_rendezvous, each) for each in pair]
        for _ in range(20):
            stranger.set(only_key(backend), pickle.dumps(Runs(mark), 2).hex())
        infos = [each.result(timeout=60) for each in met]
    assert sorted(info.rank for info in infos) == [0, 1]
    infos[0].store.set("word", "here")
    assert infos[1].store.get("word") == b"here"
    assert not mark.exists()


def test_objects_of_other_ranks_are_opened_only_with_the_seal_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c10d: Any = distributed_c10d
    for name in ("_pickler", "_unpickler"):  # put back afterwards
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
    mark = tmp_path / "mark"
    foreign, size = c10d._object_to_tensor(Runs(mark), "cpu", None)
    seal_objects(SEAL)
    own, own_size = c10d._object_to_tensor({"step": 3}, "cpu", None)
    assert c10d._tensor_to_object(own, own_size, None) == {"step": 3}
    with pytest.raises(UntrustedValueError, match="object"):
        c10d._tensor_to_object(foreign, size, None)
    assert not mark.exists()


def test_nodes_of_an_attempt_share_a_secret_that_its_owner_alone_can_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with ThreadPoolExecutor() as pool:
        found = set(pool.map(lambda _: run_secret(run, 1), range(8)))
    assert len(found) == 1 and len(found.pop()) == 32
    assert run.secret(1).stat().st_mode & 0o777 == 0o600
    assert run_secret(run, 2) != run_secret(run, 1)


def test_a_damaged_secret_is_named_with_how_to_have_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.rundir.attempt_files._WITHIN_S", 0.0)
    run = RunDir(tmp_path)
    run.attempt(1).mkdir(parents=True)
    for content in ("", "x" * 64):
        run.secret(1).write_text(content)
        with pytest.raises(StorageError, match=r"rm .*secret"):
            run_secret(run, 1)
