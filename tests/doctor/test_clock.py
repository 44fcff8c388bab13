"""The clock is compared with a time server's, which a thread plays here."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardyard.doctor.machine import clock_offset_s


@contextmanager
def time_server(ahead_s: float, *, stratum: int = 3) -> Iterator[tuple[str, int]]:
    """Answers one question (RFC 4330: 48 bytes, times since 1900 at 32 and 40)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(5)

        def answer() -> None:
            question, sender = server.recvfrom(512)
            assert question[0] & 7 == 3  # a client's
            now = time.time() + ahead_s + 2_208_988_800
            stamp = struct.pack("!II", int(now), int(now % 1 * 2**32))
            head = struct.pack("!BBBb", 0x24, stratum, 6, -20) + bytes(28)
            server.sendto(head + stamp + stamp, sender)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()
        thread.join()


@pytest.mark.parametrize("ahead_s", [0.0, 7.5, -400.0])
def test_an_offset_is_measured(ahead_s: float) -> None:
    with time_server(ahead_s) as address:
        offset_s = clock_offset_s(address, timeout_s=5)
    assert offset_s is not None and abs(offset_s - ahead_s) < 0.2


def test_a_server_that_is_not_sure_itself_is_not_believed() -> None:
    with time_server(100.0, stratum=0) as address:
        assert clock_offset_s(address, timeout_s=5) is None


def test_no_answer_is_no_offset() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert clock_offset_s(silent.getsockname(), timeout_s=0.05) is None
