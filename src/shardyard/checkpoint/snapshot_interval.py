"""When a snapshot is due: every n steps, or as far apart as loses the least time.

``auto`` weighs what a snapshot costs, as measured here, against what a failure would lose (Daly),
with the failures that the run has had so far. It moves by a factor of at least 1.5, so that noise
does not move it, and comes down to no less than the thread needs to seal a slot.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardyard.config.daly import daly_interval_s

FIRST_EVERY = 10
"""Steps between snapshots until their cost is known."""
HYSTERESIS = 1.5
_STEPS_KEPT = 50

Report = Callable[..., None]


def best_every(*, step_s: float, blocked_s: float, sealed_s: float, mtbf_s: float) -> int:
    """Steps between snapshots that lose the least time.

    Args:
        sealed_s: From the copy until the snapshot counts: the next comes no earlier.
    """
    wanted_s = daly_interval_s(blocking_s=blocked_s, mtbf_s=mtbf_s)
    return max(1, math.ceil(sealed_s / step_s), round(wanted_s / step_s))


class Interval:
    """Says when a snapshot is due; the same on all ranks, which make the same calls.

    Args:
        every: As the recipe asks; the others matter to ``auto`` alone.
        first_step: After which this process begins.
        mtbf_s: Seconds between failures, equal on all ranks.
        group: A gloo group of all ranks.
        report: Writes an event, on the rank that does.
    """

    def __init__(
        self,
        every: int | Literal["auto"],
        *,
        first_step: int = 0,
        mtbf_s: float = 0.0,
        group: dist.ProcessGroup | None = None,
        report: Report | None = None,
    ) -> None:
        self._is_fixed = every != "auto"
        self.every = FIRST_EVERY if every == "auto" else every
        self._last = first_step
        self._mtbf_s = mtbf_s
        self._group = group
        self._report = report
        self._taken = 0
        self._asked_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)

    def is_due(self, step: int) -> bool:
        """Whether to take one after this step; call it once a step."""
        now = time.monotonic()
        if self._asked_at is not None:
            self._steps_s.append(now - self._asked_at)
        self._asked_at = now
        return step % self.every == 0 if self._is_fixed else step - self._last >= self.every

    def saved(self, step: int) -> None:
        """After a save, which is a snapshot too."""
        self._last = step

    def taken(self, step: int, *, blocked_s: Sequence[float], sealed_s: Sequence[float]) -> None:
        """After a snapshot: learn from what all before have cost.

        Ranks agree at the second, fourth, eighth ...: a collective each time would cost more than
        it tells.
        """
        self._last, self._taken = step, self._taken + 1
        is_power_of_two = self._taken & (self._taken - 1) == 0
        if self._is_fixed or self._taken < 2 or not is_power_of_two:
            return
        mine = [statistics.median(each) for each in (self._steps_s, blocked_s, sealed_s)]
        costs = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(costs, dist.ReduceOp.MAX, group=self._group)
        step_s, blocked, sealed = costs.tolist()
        best = best_every(step_s=step_s, blocked_s=blocked, sealed_s=sealed, mtbf_s=self._mtbf_s)
        if max(best, self.every) < HYSTERESIS * min(best, self.every):
            return
        self.every = best
        if self._report is not None:
            facts: dict[str, Any] = {"step_s": step_s, "blocked_s": blocked, "mtbf_s": self._mtbf_s}
            self._report("snapshot_interval", step=step, every=best, **facts)
