"""What two sides say before one takes a snapshot from the other, and what is refused."""

import json
import mmap
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shardyard.checkpoint.snapshots import protocol as wire
from shardyard.checkpoint.snapshots.slot import (
    HEAD_BYTES,
    SlotHeader,
    SlotText,
    SnapshotId,
    read_head,
    read_slot,
    write_head,
)
from tests.checkpoint.slots import rows, slot_of

SECRET = b"of this generation"
Ends = tuple[socket.socket, socket.socket]
Begin = Callable[..., Future[Any]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A connection, both ends of it."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(5.0)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Call something in a thread, as another agent."""
    with ThreadPoolExecutor(max_workers=1) as other:
        yield other.submit


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def admit_one(listener: socket.socket, secret: bytes) -> bool:
    link, _ = listener.accept()
    with link:
        link.settimeout(5.0)
        return wire.authenticate(link, secret)


def place(_text: SlotText, head: SlotHeader) -> mmap.mmap:
    return mmap.mmap(-1, head.slot_bytes)


def no_place(_text: SlotText, _head: SlotHeader) -> mmap.mmap:
    raise AssertionError("no memory is taken for this")


def head_of(slot: mmap.mmap) -> SlotHeader:
    head = read_head(slot)
    assert head is not None
    return head


def test_two_that_know_the_secret_meet(listener: socket.socket, begin: Begin) -> None:
    admitted = begin(admit_one, listener, SECRET)
    with wire.connect("127.0.0.1", listener.getsockname()[1], SECRET):
        assert admitted.result() is True


def test_who_does_not_know_the_secret_is_sent_away(listener: socket.socket, begin: Begin) -> None:
    admitted = begin(admit_one, listener, SECRET)
    with pytest.raises(ConnectionResetError):
        wire.connect("127.0.0.1", listener.getsockname()[1], b"of the last generation")
    assert admitted.result() is False


def test_a_server_that_does_not_know_it_gets_no_state(
    listener: socket.socket, begin: Begin
) -> None:
    def let_everybody_in() -> None:
        link, _ = listener.accept()
        with link:
            link.sendall(b"SHYDLINK" + bytes(32))
            link.recv(64)
            link.sendall(bytes(32))

    begin(let_everybody_in)
    with pytest.raises(ConnectionError, match="does not know the secret of this generation"):
        wire.connect("127.0.0.1", listener.getsockname()[1], SECRET)


def test_something_else_that_answers_is_told(listener: socket.socket, begin: Begin) -> None:
    def greet() -> None:
        link, _ = listener.accept()
        with link:
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(40))

    begin(greet)
    with pytest.raises(ConnectionError, match="something else answers there"):
        wire.connect("127.0.0.1", listener.getsockname()[1], SECRET)


def test_a_slot_is_the_same_on_the_other_side(ends: Ends, begin: Begin) -> None:
    ours, theirs = ends
    slot = slot_of(rows(3), SnapshotId(7, 2), rank=1, world_size=2)
    received = begin(wire.receive_slot, theirs, place)
    wire.send_slot(ours, slot, head_of(slot))
    assert received.result()[:] == slot[:]


def test_what_is_damaged_on_the_way_is_refused_and_held_nowhere(ends: Ends, begin: Begin) -> None:
    ours, theirs = ends
    slot = slot_of(rows(3), SnapshotId(7, 2))
    slot[-100] ^= 1
    there = mmap.mmap(-1, len(slot))
    received = begin(wire.receive_slot, theirs, lambda _text, _head: there)
    with pytest.raises(wire.SnapshotRejectedError, match="differs from its checksum"):
        wire.send_slot(ours, slot, head_of(slot))
    assert isinstance(received.exception(), wire.SnapshotRejectedError)
    assert read_slot(there) is None


@pytest.mark.parametrize("after", [HEAD_BYTES - 1, HEAD_BYTES + 20, None])
def test_a_message_that_ends_in_the_middle_leaves_an_empty_slot(
    ends: Ends, begin: Begin, after: int | None
) -> None:
    ours, theirs = ends
    slot = slot_of(rows(3), SnapshotId(7, 2))
    there = slot_of(rows(1), SnapshotId(5, 2))
    received = begin(wire.receive_slot, theirs, lambda _text, _head: there)
    head = head_of(slot)
    if after is None:  # in the tensors
        ours.sendall(slot[: HEAD_BYTES + head.text_bytes])
        ours.recv(3)
        ours.sendall(slot[head.tensors_at : head.tensors_at + 10])
    else:
        ours.sendall(slot[:after])
    ours.close()
    with pytest.raises(ConnectionResetError, match="ended in the middle"):
        received.result()
    held = read_slot(there)
    assert held is None if after is None else held is not None


def changed(**fields: int) -> bytes:
    slot = slot_of(rows(3), SnapshotId(7, 2))
    return head_of(slot)._replace(**fields).to_bytes()


@pytest.mark.parametrize(
    "head",
    [
        changed(text_bytes=2**40, tensors_at=2**41),
        changed(text_bytes=2**21),  # behind where tensors begin
        changed(tensors_bytes=63),
        b"\x00" * HEAD_BYTES,
        struct.pack("<36s", b"SHYDSNAP" + b"\xff" * 28),
    ],
)
def test_a_length_that_cannot_be_is_refused_before_memory_is_taken(
    ends: Ends, begin: Begin, head: bytes
) -> None:
    ours, theirs = ends
    received = begin(wire.receive_slot, theirs, no_place)
    ours.sendall(head)
    with pytest.raises(wire.SnapshotRejectedError, match="not the head of a snapshot"):
        received.result()


def text_with(**fields: Any) -> bytes:
    usual: dict[str, Any] = {
        "format": 2, "moment": [7, 2], "rank": 0, "world_size": 1, "names": 1, "checksum": 0,
        "values": {}, "tensors": {"w": ["F32", [3], [0], [3], 0]},
    }  # fmt: skip
    return json.dumps(usual | fields).encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff", "not a snapshot"),
        (b"[1]", "another form"),
        (text_with(format=99), "another format"),
        (text_with(moment=[-1, 0]), "no count: -1"),
        (text_with(moment=[1]), "not a snapshot"),
        (text_with(rank=1), "rank 1 does not exist in a run of 1"),
        (text_with(more=1), "another form"),
        (text_with(tensors={"w": ["F32", [3], [1], [3], 0]}), "no place of a tensor"),
        (text_with(tensors={"w": ["F32", [3], [0], [3], 4]}), "no place of a tensor"),
        (text_with(tensors={"w": ["F33", [3], [0], [3], 0]}), "no place of a tensor"),
        (text_with(tensors={"w": ["F32", [2**40], [0], [2**40], 0]}), "has no room for"),
    ],
)
def test_a_text_of_another_form_is_refused_before_memory_is_taken(
    ends: Ends, begin: Begin, text: bytes, why: str
) -> None:
    ours, theirs = ends
    slot = mmap.mmap(-1, 2**18)
    write_head(slot, SlotHeader(len(text), 2**17, 64, 0), text)
    received = begin(wire.receive_slot, theirs, no_place)
    with pytest.raises(wire.SnapshotRejectedError, match=why):
        wire.send_slot(ours, slot, head_of(slot))
    assert received.exception() is not None


def test_a_text_that_differs_from_its_checksum_is_refused(ends: Ends, begin: Begin) -> None:
    ours, theirs = ends
    slot = slot_of(rows(3), SnapshotId(7, 2))
    slot[HEAD_BYTES + 3] ^= 1
    begin(wire.receive_slot, theirs, no_place)
    with pytest.raises(wire.SnapshotRejectedError, match="text differs from its checksum"):
        wire.send_slot(ours, slot, head_of(slot))


def test_a_request_that_does_not_exist_is_refused(ends: Ends) -> None:
    ours, theirs = ends
    ours.sendall(b"X")
    with pytest.raises(wire.SnapshotRejectedError, match="unknown request b'X'"):
        wire.next_request(theirs)
    ours.close()
    assert wire.next_request(theirs) is None
