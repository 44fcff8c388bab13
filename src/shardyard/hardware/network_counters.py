"""Bytes that this machine's network interfaces have moved, as the kernel counts them.

A log names the network that a library chose; what went over it, only the counters say.
"""

from contextlib import suppress
from pathlib import Path

EFA = "efa"
"""Begins the names of EFA interfaces here: ``efa/rdmap16s27``."""

# Of hw_counters (drivers/infiniband/hw/efa/efa_verbs.c). Whether tx_bytes counts what RDMA writes
# and reads move is not documented, so the larger of both sums is taken: it never says more than was
# sent, as each byte is in either sum once.
_ALL_SENT = ("tx_bytes",)
LOOPBACK = ("lo", "lo0")
_BY_KIND = ("send_bytes", "rdma_write_bytes", "rdma_read_resp_bytes")


def sent_bytes(root: Path = Path("/")) -> dict[str, int]:
    """Interface -> bytes sent since it is there; those of EFA by ``efa/<name>``.

    Args:
        root: Where /sys and /proc are.
    """
    return efa_sent_bytes(root) | {n: sent for n, (_, sent) in moved_bytes(root).items()}


def efa_sent_bytes(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes sent by EFA's interfaces only."""
    found = {}
    for ports in sorted((root / "sys/class/infiniband").glob("*/ports/1/hw_counters")):
        values = {name: _number(ports / name) for name in (*_ALL_SENT, *_BY_KIND)}
        if values["tx_bytes"] is None:
            continue  # InfiniBand, whose counters have other names
        sums = [sum(values[name] or 0 for name in names) for names in (_ALL_SENT, _BY_KIND)]
        found[f"{EFA}/{ports.parents[2].name}"] = max(sums)
    return found


def moved_bytes(root: Path = Path("/")) -> dict[str, tuple[int, int]]:
    """Interface -> bytes received and sent since it is there, without those of EFA."""
    found = {}
    with suppress(OSError):
        # /proc/self/net, and not /sys/class/net: that of the process's own network namespace
        for line in (root / "proc/self/net/dev").read_text().splitlines()[2:]:
            name, _, counters = line.partition(":")
            numbers = counters.split()
            found[name.strip()] = (int(numbers[0]), int(numbers[8]))
    return found


def link_bits_per_s(root: Path = Path("/")) -> int | None:
    """Return the total rate of all links that are up, in bits/s; None: no device reports it.

    A virtual device has no link, and reports no rate or -1.
    """
    speeds = []
    for device in (root / "sys/class/net").glob("*/device"):
        speed = _number(device.parent / "speed")  # in Mbit/s
        if speed is not None and speed > 0 and _text(device.parent / "operstate") == "up":
            speeds.append(speed * 10**6)
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        rate, _, unit = _text(port / "rate").partition(" Gb/sec")  # 200 Gb/sec (4X HDR)
        is_up = _text(port / "state").endswith("ACTIVE")
        if is_up and unit and rate.replace(".", "", 1).isdigit():
            speeds.append(round(float(rate) * 10**9))
    return sum(speeds) if speeds else None


def sent_since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Return interface -> bytes sent between two results of ``sent_bytes``, if any."""
    grown = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: value for name, value in grown.items() if value > 0}


def busiest(sent: dict[str, int], *, is_one_machine: bool) -> str | None:
    """The interface that sent most; None: none did.

    Args:
        is_one_machine: Whether all nodes are this machine, so that loopback is between them; else
            it only carries what never leaves it.
    """
    between = {name: size for name, size in sent.items() if (name in LOOPBACK) == is_one_machine}
    return max(between, key=lambda name: between[name], default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
