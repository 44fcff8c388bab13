"""When a snapshot or a checkpoint is due: every n steps, or as far apart as loses the least time.

``auto`` weighs what one costs, as measured here, against what a failure would lose (Daly), with the
failures that the run has had so far. It moves by a factor of at least 1.5, so that noise does not
move it, and comes down to no less than the time in which one comes to count: until a slot is
sealed, until a checkpoint is durable.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from shardyard.config.formulas import best_every

HYSTERESIS = 1.5
_STEPS_KEPT = 50
_COSTS_KEPT = 20

Report = Callable[..., None]


class Interval:
    """Decides when a save or snapshot is due; the same on all ranks, which make the same calls.

    Args:
        every: Steps that the recipe sets; the other arguments matter only to ``auto``.
        first_step: After which this process begins: the newest one that counts is of this step.
        first_every: Steps between them until their cost is known.
        mtbf_s: Seconds between failures, equal on all ranks.
        group: A gloo group of all ranks.
        report: Writes an event, on the rank that does.
    """

    def __init__(
        self,
        every: int | Literal["auto"],
        *,
        first_step: int = 0,
        first_every: int = 1,
        mtbf_s: float = 0.0,
        group: dist.ProcessGroup | None = None,
        report: Report | None = None,
    ) -> None:
        self._is_fixed = every != "auto"
        self.every = first_every if every == "auto" else every
        self.blocked_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        """For which training stood still, of the last ones."""
        self.counts_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        """From the copy until it counted, of the last ones."""
        self._last = first_step
        self._mtbf_s = mtbf_s
        self._group = group
        self._report = report
        self._num_measured = 0
        self._last_checked_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)

    def is_due(self, step: int) -> bool:
        """Whether to take one after this step; call it once a step."""
        now = time.monotonic()
        if self._last_checked_at is not None:
            self._steps_s.append(now - self._last_checked_at)
        self._last_checked_at = now
        return self.was_due(step, latest=self._last)

    def was_due(self, step: int, *, latest: int) -> bool:
        """Whether one is due at this step, or was at a step since the newest one."""
        if self._is_fixed:
            # True from a multiple on until one is taken: one that was put off stays due.
            return latest < step - step % self.every
        return step - latest >= self.every

    def taken(self, step: int) -> None:
        """After one of this step, due or not."""
        self._last = step

    def learn(self, step: int) -> None:
        """Once one counts on all ranks: look whether their cost asks for another interval.

        Ranks agree at the first, second, fourth, eighth ...: a collective each time would cost more
        than it tells.
        """
        if self._is_fixed or not self._steps_s:
            return
        self._num_measured += 1
        is_power_of_two = self._num_measured & (self._num_measured - 1) == 0
        if not is_power_of_two:
            return
        known = (self._steps_s, self.blocked_s, self.counts_s)
        # Medians: an evaluation or a save between two steps is part of a step's time here. The
        # slowest rank counts, as a step and a save end when the last rank ends them.
        costs = torch.tensor([statistics.median(each) for each in known], dtype=torch.float64)
        dist.all_reduce(costs, dist.ReduceOp.MAX, group=self._group)
        step_s, blocked_s, counts_s = costs.tolist()
        best = best_every(
            step_s=step_s, blocked_s=blocked_s, counts_s=counts_s, mtbf_s=self._mtbf_s
        )
        if max(best, self.every) < HYSTERESIS * min(best, self.every):
            return
        self.every = best
        if self._report is not None:
            facts = {"step_s": step_s, "blocked_s": blocked_s, "counts_s": counts_s}
            self._report(step=step, every=best, mtbf_s=self._mtbf_s, **facts)
