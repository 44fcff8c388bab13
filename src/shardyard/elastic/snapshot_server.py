"""Takes in the snapshots of the node before, and gives out those that this agent holds.

A listener of its own, one a generation, on the network of the meeting alone. Who does not know the
generation's secret is sent away before it can say anything else.
"""

import mmap
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from shardyard.checkpoint.snapshots import snapshot_wire as wire
from shardyard.checkpoint.snapshots.snapshot_slot import Head, SlotText
from shardyard.checkpoint.yielding import yield_to_training
from shardyard.elastic.held_snapshots import HeldSnapshots

_MOST_LINKS = 64
"""At once; further ones wait until another has ended."""


@dataclass(frozen=True)
class Expected:
    """Whose snapshots are taken in."""

    generation: int
    ranks: range
    """Of the node before."""
    world_size: int


class SnapshotServer:
    """Answers until it is closed."""

    def __init__(self, host: str, secret: bytes, held: HeldSnapshots, expected: Expected) -> None:
        """Listen on a free port.

        Args:
            host: An address of this node; nothing listens on its others.

        Raises:
            OSError: The address cannot be used.
        """
        self._secret, self._held, self._expected = secret, held, expected
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._room = threading.BoundedSemaphore(_MOST_LINKS)
        self._taking_in = threading.Lock()
        self._links: set[socket.socket] = set()
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nobody any more; what was being taken in is dropped."""
        self._is_over = True
        for each in (self._listener, *list(self._links)):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self._thread.join()
        self._listener.close()
        with self._taking_in:  # nothing is written from now on
            pass

    def _listen(self) -> None:
        yield_to_training()
        while not self._is_over:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self._room.acquire()
            self._links.add(link)
            threading.Thread(
                target=self._serve, args=(link,), name="snapshot-link", daemon=True
            ).start()

    def _serve(self, link: socket.socket) -> None:
        yield_to_training()
        link.settimeout(wire.PATIENCE_S)
        try:
            with link:
                if not wire.admit(link, self._secret):
                    raise wire.SnapshotRefusedError("who asked does not know the secret")
                while (asked := wire.next_asked(link)) is not None:
                    self._answer(link, asked)
        except (OSError, wire.SnapshotRefusedError) as error:
            if not self._is_over:
                print(f"a snapshot was not taken in or given out: {error}", file=sys.stderr)
        finally:
            self._links.discard(link)
            self._room.release()

    def _answer(self, link: socket.socket, asked: wire.Asked) -> None:
        match asked:
            case wire.Asked.PUT:
                with self._taking_in:  # one after the other: there is one node before
                    wire.receive_slot(link, self._place)
            case wire.Asked.GET:
                self._give_out(link)

    def _place(self, text: SlotText, head: Head) -> mmap.mmap:
        expected = self._expected
        whose = (text.moment.generation, text.world_size)
        if self._is_over or whose != (expected.generation, expected.world_size):
            raise wire.SnapshotRefusedError(
                f"it is of generation {text.moment.generation} with {text.world_size} ranks, and "
                f"this is generation {expected.generation} with {expected.world_size}"
            )
        if text.rank not in expected.ranks:
            raise wire.SnapshotRefusedError(f"rank {text.rank} is not on the node before this one")
        return self._held.place_for(text.rank - expected.ranks.start, head)

    def _give_out(self, link: socket.socket) -> None:
        moment, rank, world_size = wire.asked_for(link)
        held = self._held.find(moment, rank, world_size)
        if held is None:
            wire.answer(link, f"there is no snapshot of rank {rank} and step {moment.step} here")
            return
        wire.answer(link)
        wire.send_slot(link, held.memory, held.head)
