"""When a contender stops, and how long its steps took.

Steps are timed by events in the device's own queue, so that timing makes no contender wait: the
time from the end of one step on the device to the end of the next. Only the end of the warm-up and
the end of the measurement wait for the device; the wall time between those two is kept as a check.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from shardyard.parallel.device import peak_memory_bytes, synchronize

LEAST_STEPS = 3


class Pace:
    """Counts and times the steps of one contender on one rank.

    Args:
        steps: Steps to measure, fewer if time is up before.
        warm_up: Steps before those, at least two.
        stop_at: Unix seconds at which the measurement should be over.
    """

    def __init__(self, device: torch.device, *, steps: int, warm_up: int, stop_at: float) -> None:
        self.peak: dict[str, int | None] = {}
        """Bytes, once the last step is over."""
        self.wall_s = 0.0
        """From the end of the warm-up to the end of the last step."""
        self.profile: dict[str, Any] = {}
        """Where the time of one more step went, if anybody asked: ``kernels.kernel_profile``."""
        self.saving: dict[str, Any] = {}
        """What saves cost, where there were any: ``saving.saving``."""
        self.attention: str | None = None
        """The kernel by which tokens attend, where a contender says it."""
        self._device = device
        self._wanted = steps
        self._warm_up = max(2, warm_up)
        self._stop_at = stop_at
        self._last: int | None = None
        self._done = 0
        self._marks: list[torch.Event | float] = []
        self._first_step_ended = 0.0
        self._started = 0.0

    @property
    def is_done(self) -> bool:
        """Whether no further step is wanted."""
        return self._done == self._last

    def start(self) -> None:
        """Call when the model is built and the first step comes next."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        """Call after each step, as soon as its work is in the device's queue."""
        self._done += 1
        if self._done == 1:
            synchronize(self._device)
            self._first_step_ended = time.monotonic()
        if self._done == self._warm_up:
            self._end_warm_up()
        if self._done >= self._warm_up:
            self._marks.append(self._now())
        if self.is_done:
            synchronize(self._device)
            self.wall_s = time.monotonic() - self._started
            self.peak = self._peak()

    def step_times_s(self) -> list[float]:
        """Seconds of each measured step; call it once all is done."""
        times = []
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, torch.Event) and isinstance(after, torch.Event):
                times.append(before.elapsed_time(after) / 1e3)
            else:
                assert isinstance(before, float) and isinstance(after, float)
                times.append(after - before)
        return times

    def _end_warm_up(self) -> None:
        """Decide how many steps there is time for; all ranks decide alike."""
        synchronize(self._device)
        self._started = time.monotonic()
        step_s = (self._started - self._first_step_ended) / (self._warm_up - 1)
        affordable = int((self._stop_at - time.time()) / step_s)
        steps = torch.tensor(max(LEAST_STEPS, min(self._wanted, affordable)), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(steps, dist.ReduceOp.MIN)
        self._last = self._warm_up + int(steps)

    def _now(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.monotonic()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _peak(self) -> dict[str, int | None]:
        allocated = peak_memory_bytes(self._device)
        if self._device.type == "cpu":
            return {"allocated_bytes": allocated, "reserved_bytes": None, "driver_bytes": None}
        free, total = torch.accelerator.get_memory_info(self._device)
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": torch.accelerator.max_memory_reserved(self._device),
            "driver_bytes": total - free,  # now, not at the peak; other processes included
        }
