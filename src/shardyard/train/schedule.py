"""The learning rate of each step: warm-up, the schedule of the recipe or the user's own."""

import math
from typing import Literal, assert_never

from torch import Tensor

from shardyard.config.rules.own_code import SCHEDULE
from shardyard.config.schema.recipe import Optim
from shardyard.own_code import load_own

_INVERSE_SQRT_STEPS = 10_000
"""Timescale of the inverse square root without a warm-up, as of transformers' schedule."""


def _remaining(done: float, shape: Literal["linear", "cosine", "1-sqrt"]) -> float:
    """Share of the fall that is left after a share ``done`` of its steps."""
    match shape:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        case "1-sqrt":
            return 1.0 - math.sqrt(done)
        case _:
            assert_never(shape)


class OwnSchedule:
    """The user's own schedule, ``optim.schedule_module``: a factor of the peak for each step."""

    def __init__(self, optim: Optim) -> None:
        """Import it, and ask it for some steps, in order and backwards.

        Raises:
            RequestError: It cannot be imported, fails, returns no factor, or other ones when it is
                asked again: a resume could not continue with it.
        """
        assert optim.schedule_module is not None
        self._function = load_own("optim.schedule_module", optim.schedule_module, SCHEDULE)
        self._steps = int(optim.decay_steps)
        asked = sorted({1, 2, 3, max(1, self._steps // 2), self._steps})
        factors = [self.factor(step) for step in asked]
        again = [self.factor(step) for step in reversed(asked)]
        if factors != again[::-1]:
            raise self._function.returned(
                factors, f"other factors when it was asked again, {again[::-1]}"
            )

    def factor(self, step: float) -> float:
        """Factor of the peak at a step, counted as ``lr_at`` does.

        Raises:
            RequestError: The function fails, or returns no factor.
        """
        whole = int(step) if step == int(step) else step
        found = self._function(whole, self._steps)
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        if not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise self._function.returned(found, f"for step {whole} of {self._steps}")
        return float(found)


def lr_at(
    step: float, optim: Optim, *, epoch: float = 0.0, own: OwnSchedule | None = None
) -> float:
    """Learning rate of a step (1 is the first): linear warm-up, then the schedule, then its end.

    Needs resolved settings. The warm-up reaches the peak at step ``warmup_steps``; the decay
    reaches ``min_lr_ratio`` of the peak at step ``decay_steps`` and stays there.

    Args:
        step: No whole number where the batch follows the devices and has changed with them.
        epoch: Passes over the data that were complete, and what share of the next, when it began.
        own: The user's own schedule, which decides alone; None: the recipe's.
    """
    step = max(0.0, step - 1 + optim.schedule_from)
    if own is not None:
        return float(optim.lr) * own.factor(step)
    peak, warmup, end = float(optim.lr), int(optim.warmup_steps), int(optim.decay_steps)
    if step <= warmup:
        return peak * step / warmup if warmup else peak
    done = 1.0 if end <= warmup else min(1.0, (step - warmup) / (end - warmup))
    match optim.schedule:
        case "constant":
            return peak
        case "linear" | "cosine":
            share = _remaining(done, optim.schedule)
        case "poly":
            share = (1.0 - done) ** optim.poly_power
        case "wsd":
            start = max(warmup, end - round(end * optim.decay_share))
            decayed = 1.0 if end <= start else min(1.0, max(0.0, (step - start) / (end - start)))
            share = _remaining(decayed, optim.decay_shape)
        case "inverse_sqrt":
            timescale = warmup or _INVERSE_SQRT_STEPS
            return peak / math.sqrt((step - warmup + timescale) / timescale)
        case "step":
            passed = sum(milestone <= epoch for milestone in optim.milestones)
            return peak * optim.milestone_factor**passed
        case _:
            assert_never(optim.schedule)
    return peak * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)
