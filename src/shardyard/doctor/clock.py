"""Clock offset of this machine, by one question to a time server (SNTP, RFC 4330)."""

import socket
import struct
import time

AMAZON_TIME = ("169.254.169.123", 123)
"""Link-local, on every EC2 instance; it never leaves the machine's own network."""

_SINCE_1900_S = 2_208_988_800  # NTP counts from 1900, Unix from 1970


def clock_offset_s(
    server: tuple[str, int] = AMAZON_TIME, *, timeout_s: float = 0.3
) -> float | None:
    """Seconds that the server is ahead of this clock; None: it did not answer in time."""
    question = b"\x23" + bytes(47)  # version 4, client
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout_s)
        try:
            sent = time.time()
            client.sendto(question, server)
            answer = client.recv(512)
            received = time.time()
        except OSError:
            return None
    if len(answer) < 48 or answer[1] == 0:  # stratum 0: it refuses to say
        return None
    arrived, left = _unix_s(answer[32:40]), _unix_s(answer[40:48])
    return ((arrived - sent) + (left - received)) / 2


def _unix_s(stamp: bytes) -> float:
    whole, part = struct.unpack("!II", stamp)
    return float(whole) - _SINCE_1900_S + float(part) / 2**32
