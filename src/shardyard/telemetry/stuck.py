"""Which numbers stand still although they should not: their counter hangs, not the device."""

from collections.abc import Mapping, Sequence

from shardyard.rundir.telemetry import DEVICE_FIELDS

LOOKS = 12
"""In a row at which a number was the same, before it is called stuck."""


class StillWatch:
    """Compares each device with the others of its node, look by look."""

    def __init__(self, devices: int) -> None:
        self._before: dict[str, list[float | None]] = {}
        self._still = {field.name: [0] * devices for field in DEVICE_FIELDS if field.never_rests}

    def look(self, devices: Mapping[str, Sequence[float | None]]) -> dict[str, list[int]]:
        """Field -> devices whose number has not moved, while that of most others has."""
        found = {}
        for name, still in self._still.items():
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
