"""One device, asked in a thread of its own: a counter that hangs keeps nobody but itself."""

import sys
import threading
from collections.abc import Callable

from shardyard.telemetry.counters import Device, Reading


class Watched:
    """Asks for a reading when told to, and says when it has one."""

    def __init__(
        self,
        name: Callable[[], Device],
        read: Callable[[], Reading],
        answered: threading.Condition,
    ) -> None:
        self.device = Device(name="", memory_bytes=None)
        """What it is, from its first answer on."""
        self._name = name
        self._read = read
        self._answered = answered
        self._wanted = 0
        self._given = 0
        self._reading: Reading | None = None
        self._complaint = ""
        threading.Thread(target=self._answer, daemon=True).start()

    def ask(self) -> None:
        """Want a reading of now; one that is still under way is not asked twice."""
        with self._answered:
            self._wanted += 1
            self._answered.notify_all()

    @property
    def has_answered(self) -> bool:
        """Whether the last question is answered; hold the condition."""
        return self._given == self._wanted

    def take(self) -> Reading | None:
        """The answer to the last question; None: it has not come, or it was an error."""
        with self._answered:
            return self._reading if self.has_answered else None

    def _answer(self) -> None:
        while True:
            with self._answered:
                self._answered.wait_for(lambda: self._wanted > self._given)
                wanted = self._wanted
            try:
                if not self.device.name:
                    self.device = self._name()
                reading = self._read()
                complaint = ""
            except Exception as error:  # noqa: BLE001  a library's errors are its own
                reading, complaint = None, f"{type(error).__name__}: {error}"
            if complaint and complaint != self._complaint:
                print(f"telemetry: a device's counters: {complaint}", file=sys.stderr, flush=True)
            with self._answered:
                self._given, self._reading, self._complaint = wanted, reading, complaint
                self._answered.notify_all()
