"""Gaudi, by pyhlml, which comes with Habana's software.

Its functions were read in its Python source (1.9.0.580); no device of Gaudi has run this.
"""

from typing import Any

from shardyard.telemetry.counters import Device, Reading, asked, asked_whole

_ON_CORE = 0
"""HLML_TEMPERATURE_ON_AIP: on the accelerator, not on the board."""


def open_hlml(most: int) -> "Hlml | None":
    """The library with so many devices at most."""
    try:
        import pyhlml
    except (ImportError, OSError):
        return None
    try:
        pyhlml.hlmlInit()
        count = pyhlml.hlmlDeviceGetCount()
        handles = [pyhlml.hlmlDeviceGetHandleByIndex(index) for index in range(count)][:most]
    except Exception:  # noqa: BLE001  its errors have no common class
        return None
    return Hlml(pyhlml, handles) if handles else None


class Hlml:
    """All handles, opened once."""

    def __init__(self, hlml: Any, handles: list[Any]) -> None:
        self._hlml = hlml
        self._handles = handles

    @property
    def count(self) -> int:
        """Of devices."""
        return len(self._handles)

    def device(self, index: int) -> Device:
        """See Counters."""
        hlml, handle = self._hlml, self._handles[index]
        return Device(
            name=str(hlml.hlmlDeviceGetName(handle)),
            memory_bytes=asked_whole(lambda: hlml.hlmlDeviceGetMemoryInfo(handle).total),
        )

    def read(self, index: int) -> Reading:
        """See Counters."""
        hlml, handle = self._hlml, self._handles[index]
        return Reading(
            utilisation=asked(lambda: hlml.hlmlDeviceGetUtilizationRates(handle), times=0.01),
            memory_used_bytes=asked_whole(lambda: hlml.hlmlDeviceGetMemoryInfo(handle).used),
            sm_clock_mhz=asked(lambda: hlml.hlmlDeviceGetClockInfo(handle)),
            temperature_c=asked(lambda: hlml.hlmlDeviceGetTemperature(handle, _ON_CORE)),
            power_w=asked(lambda: hlml.hlmlDeviceGetPowerUsage(handle), times=0.001),
        )

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """See Counters."""
        raise NotImplementedError("XIDs are NVIDIA's")
