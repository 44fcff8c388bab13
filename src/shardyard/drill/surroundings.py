"""What a case's nodes are put on, so that it can go wrong: a network between them, or a clock."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from shardyard.drill.apart import why_not_apart
from shardyard.drill.moved_clock import MovedClock
from shardyard.drill.network import Weather, address_of
from shardyard.errors import ShardyardError
from shardyard.io.files import parse_json
from shardyard.python_program import python_program
from shardyard.rundir.drilled import HOSTS_VARIABLE, Hosts

_TUN = Path("/dev/net/tun")


# --- a network ----------------------------------------------------------------------------------


def why_no_network() -> str:
    """Why hosts with a network of their own cannot be made here; empty: they can."""
    if why := why_not_apart():
        return f"it needs networks of its own: {why}"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"it needs networks of its own, and {_TUN} is not there or not this user's to open"
    return ""


@dataclass(frozen=True)
class Network:
    """Hosts, one a node, and what is wrong between them."""

    _told: IO[str]
    _answers: IO[str]
    hosts: Hosts

    @property
    def environment(self) -> dict[str, str]:
        """For a local job whose nodes are on these hosts."""
        return {HOSTS_VARIABLE: self.hosts.to_text()}

    def become(self, weather: Weather) -> None:
        """On return the network is like that."""
        print(json.dumps(asdict(weather)), file=self._told, flush=True)
        self._answers.readline()


@contextmanager
def network_of(nodes: int) -> Iterator[Network]:
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
        yield Network(switch.stdin, switch.stdout, Hosts(enter=enter, address=address_of(0)))


# --- a clock ------------------------------------------------------------------------------------


@contextmanager
def clock_of(nodes: int) -> Iterator[tuple[MovedClock, dict[str, str]]]:
    """A clock for the last node, or for all processes where there is one; and what the run is told.

    Yields:
        The clock, and the environment of a run whose last node goes by it.
    """
    with tempfile.TemporaryDirectory(prefix="drill-clock-") as folder:
        clock = MovedClock(Path(folder))
        if nodes == 1:
            yield clock, clock.environment
            return
        own = ["env", *(f"{name}={value}" for name, value in clock.environment.items())]
        hosts = Hosts(enter=[*([[]] * (nodes - 1)), own], address="127.0.0.1")
        yield clock, {HOSTS_VARIABLE: hosts.to_text()}
