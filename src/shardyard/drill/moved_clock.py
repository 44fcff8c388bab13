"""A wall clock that a drill sets, in each Python process of a node: no clock of the machine moves.

Nothing on Linux gives a few processes a wall clock of their own. What agents and ranks could
compare between nodes is what Python tells them, so that is moved: ``time.time`` and
``datetime.now``, those of torch's Python code included. A process takes it up at its start, by a
``sitecustomize`` in a folder of its PYTHONPATH.
"""

import datetime
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VARIABLE = "SHARDYARD_DRILL_CLOCK"
_SECONDS = struct.Struct("<d")
_START = "from shardyard.drill.moved_clock import take_up; take_up()\n"


class MovedClock:
    """The clock of the processes that are started with its environment; right until it is moved.

    Args:
        folder: For its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "seconds"
        (folder / "sitecustomize.py").write_text(_START)
        self.move(0.0)

    def move(self, seconds: float) -> None:
        """Set it so far from the true time, also for processes that run."""
        self._file.touch()
        with self._file.open("r+b") as file:  # in place: they have it mapped
            file.write(_SECONDS.pack(seconds))

    @property
    def environment(self) -> dict[str, str]:
        paths = (str(self._folder), os.environ.get("PYTHONPATH", ""))
        return {_VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def take_up(environment: Mapping[str, str] = os.environ) -> None:
    """Have this process go by the clock of its environment."""
    with Path(environment[_VARIABLE]).open("rb") as file:
        told = mmap.mmap(file.fileno(), _SECONDS.size, access=mmap.ACCESS_READ)
    true_time, true_time_ns, true_datetime = time.time, time.time_ns, datetime.datetime

    def seconds() -> float:
        return float(_SECONDS.unpack_from(told)[0])

    class OfDatetimes(type):
        """What was made as a true datetime is one of the moved class too."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, true_datetime)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, true_datetime)

    class Moved(true_datetime, metaclass=OfDatetimes):  # type: ignore[misc,valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=seconds())

        @classmethod
        def utcnow(cls) -> Any:
            return super().utcnow() + datetime.timedelta(seconds=seconds())

    time.time = lambda: true_time() + seconds()
    time.time_ns = lambda: true_time_ns() + int(seconds() * 1e9)
    Moved.__name__ = Moved.__qualname__ = true_datetime.__name__
    Moved.__module__ = true_datetime.__module__  # pickled as what other processes know
    datetime.datetime = Moved  # type: ignore[misc]
