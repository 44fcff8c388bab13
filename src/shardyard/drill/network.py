"""`python -m shardyard.drill.network COUNT`: hosts on a network of their own, with faults.

Each host is a network namespace with one interface (tun), whose packets come to this process.
It passes them on to the host that they are for. It drops all where one of the two is cut off,
and delays or loses some where the network is bad. So the machine's own network is untouched,
and no module of the kernel is needed. Lines on stdin set the faults; the process ends with
stdin.
"""

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from shardyard.drill.sandbox import SkewedClock, no_namespaces_reason, unshare_network
from shardyard.errors import ShardyardError
from shardyard.io.files import parse_json
from shardyard.own_processes import python_program
from shardyard.rundir.contracts import HOSTS_VARIABLE, Hosts

INTERFACE = "drill0"
"""Name of each host's interface."""
_MTU = 65_000
_LOOPBACK = "lo"

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IP_DESTINATION = slice(16, 20)
_IPV4 = 4


def address_of(host: int) -> str:
    """Return the address at which other hosts reach a host."""
    return f"10.219.0.{host + 1}"


@dataclass(frozen=True, kw_only=True)
class NetworkConditions:
    """Faults of the network."""

    cut: tuple[int, ...] = ()
    """Hosts that are cut off from all others."""
    delay_s: float = 0.0
    """Delay of each packet in seconds."""
    loss: float = 0.0
    """Share of packets that do not arrive."""


@dataclass
class Switch:
    """Passes packets on between hosts.

    Args:
        hosts: The end of each one's interface that is here.
    """

    hosts: list[int]
    conditions: NetworkConditions = field(default_factory=NetworkConditions)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _in_flight: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    """Packets under way: when due, a number that keeps their order, for whom, what."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._by_address = {
            socket.inet_aton(address_of(number)): number for number in range(len(self.hosts))
        }

    def run(self) -> None:
        """Until stdin ends."""
        while True:
            wait_s = max(0.0, self._in_flight[0][0] - time.monotonic()) if self._in_flight else None
            ready, _, _ = select.select([*self.hosts, sys.stdin], [], [], wait_s)
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                told = parse_json(line)
                self.conditions = NetworkConditions(**{**told, "cut": tuple(told["cut"])})
                print(json.dumps(told), flush=True)
            for number, host in enumerate(self.hosts):
                if host in ready:
                    self.take_in(number)
            self.deliver()

    def take_in(self, source: int) -> None:
        """Read what a host has sent."""
        with suppress(BlockingIOError):
            while packet := os.read(self.hosts[source], _MTU + 100):
                target = self._by_address.get(packet[_IP_DESTINATION])
                if packet[0] >> 4 == _IPV4 and target is not None:
                    self._send(packet, source, target)

    def _send(self, packet: bytes, source: int, target: int) -> None:
        weather = self.conditions
        is_cut = source in weather.cut or target in weather.cut
        if is_cut or self._draw.random() < weather.loss:
            return
        due_s = time.monotonic() + weather.delay_s
        heapq.heappush(self._in_flight, (due_s, next(self._numbers), target, packet))

    def deliver(self) -> None:
        """Pass on what is due."""
        while self._in_flight and self._in_flight[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._in_flight)
            with suppress(OSError):  # a full queue drops packets, as networks do
                os.write(self.hosts[target], packet)


def make_host(number: int) -> tuple[int, int]:
    """Put this process into a new network namespace with one interface.

    Returns:
        A handle of the namespace, and this end of the interface.

    Raises:
        OSError: The machine does not allow it.
    """
    unshare_network()
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def set_up(request: int, name: str, content: bytes) -> None:
            fcntl.ioctl(asked, request, struct.pack("16s16s8x", name.encode(), content))

        set_up(_SIOCSIFADDR, INTERFACE, _as_socket_address(address_of(number)))
        set_up(_SIOCSIFNETMASK, INTERFACE, _as_socket_address("255.255.255.0"))
        set_up(_SIOCSIFMTU, INTERFACE, struct.pack("i", _MTU))
        for name in (INTERFACE, _LOOPBACK):
            set_up(_SIOCSIFFLAGS, name, struct.pack("H", _IFF_UP | _IFF_RUNNING))
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun


def _as_socket_address(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def main(count: int) -> int:
    """Make hosts, tell how to enter each, and join them."""
    made = [make_host(number) for number in range(count)]
    handles = [f"/proc/{os.getpid()}/fd/{namespace}" for namespace, _ in made]
    print(json.dumps(handles), flush=True)
    Switch([tun for _, tun in made]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))


# What a case's nodes are put on, so that it can go wrong: a network between them, or a clock.

_TUN = Path("/dev/net/tun")


# --- a network ----------------------------------------------------------------------------------


def no_network_reason() -> str:
    """Why hosts with a network of their own cannot be made here; empty: they can."""
    if why := no_namespaces_reason():
        return f"it needs networks of its own: {why}"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"it needs networks of its own, and {_TUN} is not there or not this user's to open"
    return ""


@dataclass(frozen=True)
class DrillNetwork:
    """Hosts, one a node, and what is wrong between them."""

    _requests: IO[str]
    _answers: IO[str]
    hosts: Hosts

    @property
    def environment(self) -> dict[str, str]:
        """For a local job whose nodes are on these hosts."""
        return {HOSTS_VARIABLE: self.hosts.to_text()}

    def apply(self, conditions: NetworkConditions) -> None:
        """On return the network is like that."""
        print(json.dumps(asdict(conditions)), file=self._requests, flush=True)
        self._answers.readline()


@contextmanager
def network_of(nodes: int) -> Iterator[DrillNetwork]:
    """Hosts while the block runs.

    Raises:
        ShardyardError: The machine does not allow it, although it looked as if it did.
    """
    with subprocess.Popen(
        python_program("shardyard.drill.network", str(nodes)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as switch:  # fmt: skip
        assert switch.stdin is not None and switch.stdout is not None and switch.stderr is not None
        handles = switch.stdout.readline()
        if not handles:
            words = switch.stderr.read().strip().splitlines()[-1:]
            raise ShardyardError(
                f"no network of its own could be made for each node ({' '.join(words)}). Leave "
                "network-cut and delay-and-loss out (--faults)."
            )
        enter = [["nsenter", f"--net={handle}"] for handle in parse_json(handles)]
        yield DrillNetwork(switch.stdin, switch.stdout, Hosts(enter=enter, address=address_of(0)))


# --- a clock ------------------------------------------------------------------------------------


@contextmanager
def clock_of(nodes: int) -> Iterator[tuple[SkewedClock, dict[str, str]]]:
    """Set up a clock for the last node, or for all processes where there is one.

    Yields:
        The clock, and the environment of a run whose last node goes by it.
    """
    with tempfile.TemporaryDirectory(prefix="drill-clock-") as folder:
        clock = SkewedClock(Path(folder))
        if nodes == 1:
            yield clock, clock.environment
            return
        own = ["env", *(f"{name}={value}" for name, value in clock.environment.items())]
        hosts = Hosts(enter=[*([[]] * (nodes - 1)), own], address="127.0.0.1")
        yield clock, {HOSTS_VARIABLE: hosts.to_text()}
