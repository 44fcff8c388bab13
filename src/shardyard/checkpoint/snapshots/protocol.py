"""Peer snapshots: their progress, their transfer over TCP, and those that other nodes hold.

The agent records how far the peer has the node's snapshots, and the node's workers wait for it.
The record is one number of eight bytes for each rank, each written in one store, and one for the
node.
"""

import hmac
import json
import mmap
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardyard.checkpoint.snapshots.slot import (
    HEAD_BYTES,
    Sealed,
    SlotHeader,
    SlotText,
    SnapshotId,
    checksum,
    content_of,
    empty,
    read_slot,
    write_head,
)
from shardyard.checkpoint.staging_protocol import MemoryProvider
from shardyard.config.formulas import ELSEWHERE
from shardyard.io.files import parse_json

SENT_BYTES = 8
"""Bytes of each number."""


class ReplicationState:
    """Numbers in the agent's memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._fields = memoryview(memory).cast("q")

    @staticmethod
    def bytes_for(local_ranks: int) -> int:
        """Return the bytes of memory for the ranks of one node."""
        return SENT_BYTES * (1 + local_ranks)

    def begin(self) -> None:
        """Begin a generation: no peer is there yet, and no snapshot is sent."""
        # The peer's flag goes first: a worker that reads in between then waits for no peer.
        self._fields[0] = 0
        for place in range(1, len(self._fields)):
            self._fields[place] = -1

    def set_has_peer(self, has_peer: bool) -> None:
        """Whether snapshots are sent to one from now on."""
        self._fields[0] = int(has_peer)

    def note(self, local_rank: int, step: int) -> None:
        """The neighbour holds this rank's snapshot of a step."""
        self._fields[1 + local_rank] = step

    def step(self, local_rank: int) -> int:
        """Return the step of the peer's newest snapshot of this generation; -1: it has none."""
        return int(self._fields[1 + local_rank])

    def is_awaited(self, local_rank: int, step: int) -> bool:
        """Whether the neighbour is there, and has this snapshot of a rank not yet."""
        return bool(self._fields[0]) and self.step(local_rank) < step


# Snapshots go from agent to agent, and from an agent to a worker, over a TCP connection.
#
# Client and server first prove to each other that they know the secret of the generation:
#
#     server   a mark, 32 random bytes
#     client   32 random bytes of its own, HMAC-SHA256 over both
#     server   HMAC-SHA256 over both, in its own name
#
# Then the client asks, as often as it likes:
#
#     put   the client sends a slot, which the server keeps
#     get   step, generation, rank and world size: the server sends that slot
#
# A slot goes in two parts, its head with its text and then its tensors, each with an answer. So
# the receiver checks all lengths before it takes memory, and compares the checksum at the end.
# Contents are neither encrypted nor signed, as gradients are not. This protocol belongs on the
# network on which the ranks exchange gradients.

PATIENCE_S = 10.0
"""For the other side to send or take something; all that two say at their meeting."""
MOST_TEXT_BYTES = 2**26
"""Most bytes of a slot's text: some hundred for each tensor, and values other than tensors."""

_GREETING = b"SHYDLINK"
_NONCE_BYTES = _MAC_BYTES = 32
_CHUNK_BYTES = 2**22
_ASKED = struct.Struct("<QQII")
"""Step, generation, rank, world size."""
_ANSWER = struct.Struct("<?H")
"""Whether it is well, and bytes of why it is not."""

Allocate = Callable[[SlotText, SlotHeader], mmap.mmap]
"""Gives the memory for a slot that comes; raises SnapshotRejectedError."""


class SnapshotRejectedError(Exception):
    """One side does not want what the other has to say; why."""


class RequestKind(Enum):
    """Requests that a client may send; a byte each."""

    PUT = b"P"
    GET = b"G"


def authenticate(link: socket.socket, secret: bytes) -> bool:
    """Whether a client that has come knows the secret; it is shown that this server does."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    _send(link, _GREETING + mine)
    said = _receive(link, _NONCE_BYTES + _MAC_BYTES, until_s=time.monotonic() + PATIENCE_S)
    nonces = mine + said[:_NONCE_BYTES]
    if not hmac.compare_digest(said[_NONCE_BYTES:], _mac(secret, b"client", nonces)):
        return False
    _send(link, _mac(secret, b"server", nonces))
    return True


def connect(host: str, port: int, secret: bytes) -> socket.socket:
    """Connect to a server; both sides prove that they know the secret.

    Raises:
        OSError: There is no answer, or not one of such a server.
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


def next_request(link: socket.socket) -> RequestKind | None:
    """Return the client's next request, however long it takes; None: it has left.

    Raises:
        SnapshotRejectedError: The request is unknown.
    """
    link.settimeout(None)
    kind = link.recv(1)
    link.settimeout(PATIENCE_S)
    if not kind:
        return None
    try:
        return RequestKind(kind)
    except ValueError:
        raise SnapshotRejectedError(f"unknown request {kind!r}") from None


def put(link: socket.socket, slot: mmap.mmap, head: SlotHeader) -> None:
    """Have the server keep a slot; on return it has it, and its checksum was compared there.

    Raises:
        SnapshotRejectedError: The server does not want it, or something else came.
        OSError: The connection broke.
    """
    _send(link, RequestKind.PUT.value)
    send_slot(link, slot, head)


def get(
    link: socket.socket, snapshot_id: SnapshotId, *, rank: int, world_size: int, allocate: Allocate
) -> mmap.mmap:
    """A slot that the server has, its checksum compared.

    Raises:
        SnapshotRejectedError: The server has it no more, or something else came.
        OSError: The connection broke.
    """
    _send(link, RequestKind.GET.value + _ASKED.pack(*snapshot_id, rank, world_size))
    _check_reply(link)
    return receive_slot(link, allocate)


def read_get_request(link: socket.socket) -> tuple[SnapshotId, int, int]:
    """Receive the moment, rank and world size of a GET."""
    step, generation, rank, world_size = _ASKED.unpack(_receive(link, _ASKED.size))
    return SnapshotId(step, generation), rank, world_size


def reply(link: socket.socket, reason: str = "") -> None:
    """Accept a request, or reject it with a reason."""
    # The length is a 16-bit field of _ANSWER.
    words = reason.encode()[:1000]
    _send(link, _ANSWER.pack(not words, len(words)) + words)


def send_slot(link: socket.socket, slot: mmap.mmap, head: SlotHeader) -> None:
    """Send what a slot holds; its memory may change meanwhile, which the other side will notice.

    Raises:
        SnapshotRejectedError: The other side does not want it, or noticed.
    """
    with memoryview(slot) as content:
        _send(link, head.to_bytes())
        _send(link, content[HEAD_BYTES : HEAD_BYTES + head.text_bytes])
        _check_reply(link)
        _send(link, content[head.tensors_at : head.slot_bytes])
        _check_reply(link)


def receive_slot(link: socket.socket, allocate: Allocate) -> mmap.mmap:
    """Receive a slot, which is empty until all of it is there and has its checksum.

    Raises:
        SnapshotRejectedError: The data is not right, or there is no place for it; the other side
            has been notified.
    """
    try:
        head = SlotHeader.from_bytes(_receive(link, HEAD_BYTES))
        if head is None or head.text_bytes > MOST_TEXT_BYTES:
            raise SnapshotRejectedError("this is not the head of a snapshot")
        content = _receive(link, head.text_bytes)
        try:
            text = SlotText.from_bytes(content, head)
        except ValueError as error:
            raise SnapshotRejectedError(f"not a snapshot: {error}") from error
        memory = allocate(text, head)
        # The old head must not vouch for new bytes if the transfer breaks off.
        empty(memory)
        reply(link)
        with memoryview(memory) as whole:
            _receive_into(link, whole[head.tensors_at : head.slot_bytes])
        if checksum(content_of(memory, head.tensors_at, head.tensors_bytes)) != text.checksum:
            raise SnapshotRejectedError("what came differs from its checksum")
        write_head(memory, head, content)
    except SnapshotRejectedError as refused:
        reply(link, str(refused))
        raise
    reply(link)
    return memory


def _mac(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    # The name of the side is signed too: neither proof can be sent back as the other's.
    return hmac.digest(secret, who + nonces, "sha256")


def _check_reply(link: socket.socket) -> None:
    is_well, size = _ANSWER.unpack(_receive(link, _ANSWER.size))
    words = _receive(link, size).decode(errors="replace")
    if not is_well:
        raise SnapshotRejectedError(words)


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
            # One deadline for the whole: a sender of single bytes would renew a timeout per read.
            # 0 would make the socket non-blocking.
            link.settimeout(max(0.001, until_s - time.monotonic()))
        received = link.recv_into(rest[:_CHUNK_BYTES])
        if not received:
            raise ConnectionResetError("the other side ended in the middle")
        rest = rest[received:]


# A rank fetches the snapshots that its node lacks from the agents of other nodes.
#
# Each agent lists at the start of a generation which snapshots it holds, of its own ranks and of
# those of the node before. Workers read these lists in their own agent's memory.


@dataclass(frozen=True, kw_only=True)
class SnapshotReplica:
    """A snapshot that an agent holds."""

    step: int
    generation: int
    rank: int
    world_size: int
    slot_bytes: int

    @property
    def snapshot_id(self) -> SnapshotId:
        return SnapshotId(self.step, self.generation)


@dataclass(frozen=True, kw_only=True)
class RemoteSnapshot:
    """One that another node's agent holds, and where that answers."""

    holding: SnapshotReplica
    host: str
    port: int
    secret: bytes
    is_from_peer = True

    @property
    def bytes_to_fetch(self) -> int:
        return self.holding.slot_bytes

    @property
    def snapshot_id(self) -> SnapshotId:
        return self.holding.snapshot_id

    @property
    def rank(self) -> int:
        return self.holding.rank

    @property
    def world_size(self) -> int:
        return self.holding.world_size

    def read(self) -> Sealed:
        """Get it, into memory of this process's own; its checksum was compared.

        Raises:
            SnapshotRejectedError: The agent is gone, has it no more, or what came is damaged.
        """
        try:
            with connect(self.host, self.port, self.secret) as link:
                memory = get(
                    link,
                    self.snapshot_id,
                    rank=self.rank,
                    world_size=self.world_size,
                    allocate=self._allocate,
                )
        except (OSError, SnapshotRejectedError) as error:
            raise SnapshotRejectedError(f"cannot be had from {self.host} ({error})") from error
        found = read_slot(memory)
        assert found is not None  # it was read on the way
        return found

    def _allocate(self, text: SlotText, head: SlotHeader) -> mmap.mmap:
        asked = (self.snapshot_id, self.rank, self.world_size, self.holding.slot_bytes)
        if (text.snapshot_id, text.rank, text.world_size, head.slot_bytes) != asked:
            raise SnapshotRejectedError("this is not the snapshot that was asked for")
        return mmap.mmap(-1, head.slot_bytes)


def remote_snapshots_to_json(secret: bytes, agents: list[dict[str, Any]]) -> bytes:
    """Encode what agents of other nodes hold, for the workers of this one.

    Args:
        agents: ``host`` and ``port`` of each, and in ``held`` the fields of its holdings.
    """
    return json.dumps({"secret": secret.hex(), "agents": agents}).encode()


def read_remote_snapshots(memory: MemoryProvider) -> list[RemoteSnapshot]:
    """Return what agents of other nodes hold; empty without a list of it."""
    content = memory(ELSEWHERE)
    if content is None:
        return []
    with content:
        told = parse_json(content[:])
    secret = bytes.fromhex(told["secret"])
    return [
        RemoteSnapshot(
            holding=SnapshotReplica(**held), host=agent["host"], port=agent["port"], secret=secret
        )
        for agent in told["agents"]
        for held in agent["held"]
    ]
