"""What is asked of a vendor's library: its devices, and the numbers of one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one device told; None: it did not, which is not 0."""

    utilisation: float | None = None
    """Share of the time in which any kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_copy_utilisation: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    ecc_uncorrected: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    pcie_link_bytes_per_s: int | None = None
    """What its link is set to now, one way; a device at rest may lower it."""
    pcie_link_most_bytes_per_s: int | None = None
    """What it and its slot could be set to."""
    slowed_by: str | None = None
    """Why its clock is held down, beyond what is usual; empty: it is not."""


@dataclass(frozen=True)
class Device:
    """One that can be read."""

    name: str
    memory_bytes: int | None


class Counters(Protocol):
    """A vendor's library, opened once; its handles are kept."""

    @property
    def count(self) -> int: ...

    def device(self, index: int) -> Device:
        """What a device is; like ``read`` it may take long, and raise whatever the library does."""
        ...

    def read(self, index: int) -> Reading:
        """The numbers of one device."""
        ...

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """The next error that the driver tells: (device, XID); None: none in that time."""
        ...


Opens = Callable[[int], Counters | None]
"""How a library is opened, of so many devices at most; None: it is not there, or sees none."""


def asked(question: Callable[[], object], *, times: float = 1.0) -> float | None:
    """A number in another unit; None where the device does not have it, or not now."""
    try:
        found = question()
    except Exception:  # noqa: BLE001  each library has errors of its own, one for each field it lacks
        return None
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None  # amdsmi answers "N/A"
    return found * times


def asked_whole(question: Callable[[], object], *, times: int = 1) -> int | None:
    """As ``asked``, of a count."""
    found = asked(question, times=times)
    return None if found is None else int(found)
