"""Clock, power, heat and load of the devices, each second beside a measurement.

They are read in the process that starts the others, so that no step waits for the driver. Without
NVML (another vendor, no driver, no binding) there are none, and a line says null.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from shardyard.telemetry.vendors import Counters, open_nvml

EVERY_S = 1.0


class Clocks:
    """Reads devices in a thread; use it in a ``with``.

    Args:
        devices: How many are measured: the first ones that this process sees.
        open_counters: Gives what is read, or None.
    """

    def __init__(
        self,
        devices: int,
        *,
        every_s: float = EVERY_S,
        open_counters: Callable[[int], Counters | None] = open_nvml,
    ) -> None:
        self._counters = open_counters(devices)
        self._every_s = every_s
        self._samples: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read_on, daemon=True)

    def __enter__(self) -> "Clocks":
        if self._counters is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._counters is not None:
            self._thread.join(timeout=5.0)

    def take(self) -> list[dict[str, Any]] | None:
        """One for each second and device since the last call; None: nothing can be read here."""
        if self._counters is None:
            return None
        taken, self._samples = self._samples, []
        return taken

    def _read_on(self) -> None:
        counters = self._counters
        assert counters is not None
        began = time.monotonic()
        while True:
            for index in range(counters.count):
                seen = counters.read(index)
                self._samples.append({
                    "t": round(time.monotonic() - began, 2), "device": index,
                    "sm_clock_mhz": seen.sm_clock_mhz, "power_w": seen.power_w,
                    "temperature_c": seen.temperature_c, "utilisation": seen.utilisation,
                    "slowed_by": seen.slowed_by,
                })  # fmt: skip
            if self._over.wait(self._every_s):
                return
