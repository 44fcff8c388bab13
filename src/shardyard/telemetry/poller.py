"""Poll devices for telemetry, and detect counters that wrongly stay constant."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from shardyard.rundir.telemetry import DEVICE_FIELDS
from shardyard.telemetry.vendors import Device, Reading

LOOKS = 12
"""In a row at which a number was the same, before it is called stuck."""


class StuckCounterDetector:
    """Compares each device with the others of its node, look by look."""

    def __init__(self, devices: int) -> None:
        self._before: dict[str, list[float | None]] = {}
        self._unchanged = {
            field.name: [0] * devices for field in DEVICE_FIELDS if field.never_rests
        }

    def update(self, devices: Mapping[str, Sequence[float | None]]) -> dict[str, list[int]]:
        """Field -> devices whose number has not moved, while that of most others has."""
        found = {}
        for name, still in self._unchanged.items():
            values, before = list(devices[name]), self._before.get(name)
            self._before[name] = values
            if before is None:
                continue
            moves = [
                value is not None and value != was
                for value, was in zip(values, before, strict=True)
            ]
            told = [value is not None for value in values]
            if sum(moves) * 2 > sum(told):  # else they rest, all of them
                for device, is_moving in enumerate(moves):
                    still[device] = 0 if is_moving or not told[device] else still[device] + 1
            if stuck := [device for device, looks in enumerate(still) if looks >= LOOKS]:
                found[name] = stuck
        return found


# One device, asked in a thread of its own: a counter that hangs keeps nobody but itself.


class DevicePoller:
    """Device that is read on request, and reports each answer to its reader.

    Args:
        name: Returns the device; called once.
        read: Returns its numbers.
        completions: Queue that gets an entry at each answer. A condition that all devices
            share would wake all of their threads at each answer.
    """

    def __init__(
        self,
        name: Callable[[], Device],
        read: Callable[[], Reading],
        completions: "SimpleQueue[None]",
    ) -> None:
        self.device = Device(name="", memory_bytes=None)
        """Device, from its first answer on."""
        self._name = name
        self._read = read
        self._completions = completions
        self._questions: SimpleQueue[int] = SimpleQueue()
        self._last_request = 0
        self._answer: tuple[int, Reading | None] = (0, None)
        self._complaint = ""
        threading.Thread(target=self._answer_all, daemon=True).start()

    def ask(self) -> bool:
        """Want a reading of now.

        Returns:
            False: the question before is still open, so this one is not asked.
        """
        if not self.is_idle:
            return False
        self._last_request += 1
        self._questions.put(self._last_request)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no question is open."""
        return self._answer[0] == self._last_request

    def take(self) -> Reading | None:
        """The answer to the last question; None: it has not come, or it was an error."""
        number, reading = self._answer
        return reading if number == self._last_request else None

    def _answer_all(self) -> None:
        while True:
            number = self._questions.get()
            reading, complaint = None, ""
            try:
                if not self.device.name:
                    self.device = self._name()
                reading = self._read()
            except Exception as error:  # noqa: BLE001  a library's errors are its own
                complaint = f"{type(error).__name__}: {error}"
            if complaint and complaint != self._complaint:
                print(f"telemetry: a device's counters: {complaint}", file=sys.stderr, flush=True)
            self._complaint = complaint
            self._answer = (number, reading)
            self._completions.put(None)
