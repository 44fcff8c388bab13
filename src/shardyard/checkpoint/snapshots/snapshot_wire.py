"""How snapshots go from agent to agent, and from an agent to a worker: over a TCP connection.

Whoever comes first shows that it knows the secret of the generation, and is shown the same:

    server   a mark, 32 random bytes
    client   32 random bytes of its own, HMAC-SHA256 over both
    server   HMAC-SHA256 over both, in its own name

Then the client asks, as often as it likes:

    put   the client sends a slot, which the server keeps
    get   step, generation, rank and world size: the server sends that slot

A slot goes in two parts, its head with its text and then its tensors, each with an answer. So
whoever receives it looks at all lengths before it takes memory, and tells at the end whether what
came has the checksum that the text names. What is sent after the meeting is neither encrypted nor
signed: it belongs on the network on which the ranks exchange gradients.
"""

import hmac
import mmap
import secrets
import socket
import struct
import time
from collections.abc import Callable
from enum import Enum

from shardyard.checkpoint.snapshots.snapshot_slot import (
    HEAD_BYTES,
    Head,
    Moment,
    SlotText,
    checksum,
    content_of,
    empty,
    write_head,
)

PATIENCE_S = 10.0
"""For the other side to send or take something; all that two say at their meeting."""
MOST_TEXT_BYTES = 2**26
"""Of a slot: some hundred for each tensor, and what is no tensor."""

_GREETING = b"SHYDLINK"
_NONCE_BYTES = _MAC_BYTES = 32
_CHUNK_BYTES = 2**22
_ASKED = struct.Struct("<QQII")
"""Step, generation, rank, world size."""
_ANSWER = struct.Struct("<?H")
"""Whether it is well, and bytes of why it is not."""

Place = Callable[[SlotText, Head], mmap.mmap]
"""Gives the memory for a slot that comes; raises SnapshotRefusedError."""


class SnapshotRefusedError(Exception):
    """One side does not want what the other has to say; why."""


class Asked(Enum):
    """What a client may ask for; a byte each."""

    PUT = b"P"
    GET = b"G"


def admit(link: socket.socket, secret: bytes) -> bool:
    """Whether a client that has come knows the secret; it is shown that this server does."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    _send(link, _GREETING + mine)
    said = _receive(link, _NONCE_BYTES + _MAC_BYTES, until_s=time.monotonic() + PATIENCE_S)
    nonces = mine + said[:_NONCE_BYTES]
    if not hmac.compare_digest(said[_NONCE_BYTES:], _mac(secret, b"client", nonces)):
        return False
    _send(link, _mac(secret, b"server", nonces))
    return True


def meet(host: str, port: int, secret: bytes) -> socket.socket:
    """A connection to a server that knows the secret, as it was shown that this client does.

    Raises:
        OSError: Nobody answers there, or not as such a server does.
    """
    link = socket.create_connection((host, port), timeout=PATIENCE_S)
    try:
        until_s = time.monotonic() + PATIENCE_S
        said = _receive(link, len(_GREETING) + _NONCE_BYTES, until_s=until_s)
        if not said.startswith(_GREETING):
            raise ConnectionError("something else answers there")
        mine = secrets.token_bytes(_NONCE_BYTES)
        nonces = said[len(_GREETING) :] + mine
        _send(link, mine + _mac(secret, b"client", nonces))
        proof = _receive(link, _MAC_BYTES, until_s=until_s)
        if not hmac.compare_digest(proof, _mac(secret, b"server", nonces)):
            raise ConnectionError("it does not know the secret of this generation")
    except BaseException:
        link.close()
        raise
    link.settimeout(PATIENCE_S)
    return link


def next_asked(link: socket.socket) -> Asked | None:
    """What the client asks for next, however long it takes; None: it has left.

    Raises:
        SnapshotRefusedError: There is no such request.
    """
    link.settimeout(None)
    kind = link.recv(1)
    link.settimeout(PATIENCE_S)
    if not kind:
        return None
    try:
        return Asked(kind)
    except ValueError:
        raise SnapshotRefusedError(f"there is no request {kind!r}") from None


def put(link: socket.socket, slot: mmap.mmap, head: Head) -> None:
    """Have the server keep a slot; on return it has it, and its checksum was compared there.

    Raises:
        SnapshotRefusedError: The server does not want it, or something else came.
        OSError: The connection broke.
    """
    _send(link, Asked.PUT.value)
    send_slot(link, slot, head)


def get(
    link: socket.socket, moment: Moment, *, rank: int, world_size: int, place: Place
) -> mmap.mmap:
    """A slot that the server has, its checksum compared.

    Raises:
        SnapshotRefusedError: The server has it no more, or something else came.
        OSError: The connection broke.
    """
    _send(link, Asked.GET.value + _ASKED.pack(*moment, rank, world_size))
    _hear(link)
    return receive_slot(link, place)


def asked_for(link: socket.socket) -> tuple[Moment, int, int]:
    """Of a GET: moment, rank and world size."""
    step, generation, rank, world_size = _ASKED.unpack(_receive(link, _ASKED.size))
    return Moment(step, generation), rank, world_size


def answer(link: socket.socket, refused: str = "") -> None:
    """Go on; or not, and why."""
    words = refused.encode()[:1000]
    _send(link, _ANSWER.pack(not words, len(words)) + words)


def send_slot(link: socket.socket, slot: mmap.mmap, head: Head) -> None:
    """Send what a slot holds; its memory may change meanwhile, which the other side will notice.

    Raises:
        SnapshotRefusedError: The other side does not want it, or noticed.
    """
    with memoryview(slot) as content:
        _send(link, head.to_bytes())
        _send(link, content[HEAD_BYTES : HEAD_BYTES + head.text_bytes])
        _hear(link)
        _send(link, content[head.tensors_at : head.slot_bytes])
        _hear(link)


def receive_slot(link: socket.socket, place: Place) -> mmap.mmap:
    """Take a slot in, which holds nothing until all of it is there and has its checksum.

    Raises:
        SnapshotRefusedError: What came is not right, or there is no place for it; the other side
            was told.
    """
    try:
        head = Head.from_bytes(_receive(link, HEAD_BYTES))
        if head is None or head.text_bytes > MOST_TEXT_BYTES:
            raise SnapshotRefusedError("this is not the head of a snapshot")
        content = _receive(link, head.text_bytes)
        try:
            text = SlotText.from_bytes(content, head)
        except ValueError as error:
            raise SnapshotRefusedError(f"this is no snapshot: {error}") from error
        memory = place(text, head)
        empty(memory)
        answer(link)
        with memoryview(memory) as whole:
            _receive_into(link, whole[head.tensors_at : head.slot_bytes])
        if checksum(content_of(memory, head.tensors_at, head.tensors_bytes)) != text.checksum:
            raise SnapshotRefusedError("what came differs from its checksum")
        write_head(memory, head, content)
    except SnapshotRefusedError as refused:
        answer(link, str(refused))
        raise
    answer(link)
    return memory


def _mac(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")


def _hear(link: socket.socket) -> None:
    is_well, size = _ANSWER.unpack(_receive(link, _ANSWER.size))
    words = _receive(link, size).decode(errors="replace")
    if not is_well:
        raise SnapshotRefusedError(words)


def _send(link: socket.socket, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[link.send(rest[:_CHUNK_BYTES]) :]  # each with a time of its own


def _receive(link: socket.socket, size: int, *, until_s: float | None = None) -> bytes:
    content = bytearray(size)
    _receive_into(link, memoryview(content), until_s=until_s)
    return bytes(content)


def _receive_into(link: socket.socket, rest: memoryview, *, until_s: float | None = None) -> None:
    while rest:
        if until_s is not None:
            link.settimeout(max(0.001, until_s - time.monotonic()))
        received = link.recv_into(rest[:_CHUNK_BYTES])
        if not received:
            raise ConnectionResetError("the other side ended in the middle")
        rest = rest[received:]
