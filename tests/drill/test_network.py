"""A network between hosts that a drill makes worse: packets between sockets, no namespace."""

import os
import socket
from collections.abc import Iterator

import pytest

from shardyard.drill.network import NetworkConditions, Switch, address_of

PACKET = b"\x45" + bytes(11)
"""The first bytes of one of IPv4, up to its addresses."""


def packet(source: int, target: int) -> bytes:
    addresses = (socket.inet_aton(address_of(host)) for host in (source, target))
    return PACKET + b"".join(addresses) + b"hello"


class Hosts:
    """Three hosts on a switch."""

    def __init__(self) -> None:
        self.ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
        for end in (end for pair in self.ends for end in pair):
            end.setblocking(False)
        self.switch = Switch([inner.fileno() for inner, _ in self.ends])

    def send(self, source: int, content: bytes) -> None:
        os.write(self.ends[source][1].fileno(), content)
        self.switch.take_in(source)
        self.switch.deliver()

    def received(self, host: int) -> bytes | None:
        try:
            return os.read(self.ends[host][1].fileno(), 100)
        except BlockingIOError:
            return None


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    for end in (end for pair in made.ends for end in pair):
        end.close()


def test_a_packet_comes_to_the_host_that_it_is_for_and_to_no_other(hosts: Hosts) -> None:
    hosts.send(0, packet(0, 2))
    assert hosts.received(2) == packet(0, 2) and hosts.received(1) is None
    hosts.send(1, b"\x60" + packet(1, 0)[1:])  # no IPv4
    hosts.send(1, PACKET + bytes(8))  # to nobody here
    assert [hosts.received(host) for host in range(3)] == [None] * 3


def test_a_host_that_is_cut_off_neither_hears_nor_is_heard(hosts: Hosts) -> None:
    hosts.switch.conditions = NetworkConditions(cut=(1,))
    for source, target in ((0, 1), (1, 2), (0, 2)):
        hosts.send(source, packet(source, target))
    assert [hosts.received(host) for host in range(3)] == [None, None, packet(0, 2)]
    hosts.switch.conditions = NetworkConditions()
    hosts.send(1, packet(1, 0))
    assert hosts.received(0) == packet(1, 0)


def test_bad_weather_delays_in_order_and_loses_some(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("shardyard.drill.network.time.monotonic", lambda: now_s[0])
    hosts.switch.conditions = NetworkConditions(delay_s=0.5)
    contents = [packet(0, 1) + bytes([number]) for number in range(3)]
    for content in contents:
        hosts.send(0, content)
    assert hosts.received(1) is None
    now_s[0] += 0.5
    hosts.switch.deliver()
    assert [hosts.received(1) for _ in contents] == contents
    hosts.switch.conditions = NetworkConditions(loss=0.5)
    arrived = 0
    for _ in range(100):
        hosts.send(0, packet(0, 1))
        arrived += hosts.received(1) is not None
    assert 20 < arrived < 80
