"""Random numbers of a sample in an epoch: a function of only (seed, epoch, sample, place).

No draw depends on another, on the process or on the order of asking. So every number of
processes and threads sees the same pixels, and a resume needs no replay.
"""

import math
from enum import IntEnum
from functools import cached_property

from shardyard.data.order import GOLDEN, mix


class RngPurpose(IntEnum):
    """Purposes of drawn numbers. A run's pixels follow from these values: they never change."""

    CROP = 1
    FLIP = 2
    RAND_AUGMENT = 3
    ERASE = 4
    MIX = 5


class KeyedRng:
    """The numbers of a sample in an epoch."""

    def __init__(self, seed: int, epoch: int, sample: int) -> None:
        self._seed, self._epoch, self._sample = seed, epoch, sample

    def uniform(self, purpose: RngPurpose, number: int) -> float:
        """From 0 to 1, 1 left out, each alike.

        Args:
            number: Of the draw at its place, which may need several; below 2**32.
        """
        counter = (purpose << 32) + number
        return (mix(self._key + counter * GOLDEN) >> 11) * 2.0**-53

    def uniform_between(self, purpose: RngPurpose, number: int, low: float, high: float) -> float:
        """From ``low`` to ``high``, each alike."""
        return low + (high - low) * self.uniform(purpose, number)

    def randint(self, purpose: RngPurpose, number: int, end: int) -> int:
        """A whole number from 0 to ``end`` - 1, each alike (``end`` up to 2**32)."""
        return int(self.uniform(purpose, number) * end)

    def symmetric_beta(self, purpose: RngPurpose, number: int, a: float) -> float:
        """From 0 to 1, by the distribution Beta(a, a); takes the draws ``number`` and the next.

        Source: L. Devroye 1996, "Random variate generation in one line of code", section 4: exact
        for every a > 0, and without rejection.
        """
        radius = 1.0 - self.uniform(purpose, number)  # above 0
        cosine = math.cos(2.0 * math.pi * self.uniform(purpose, number + 1))
        # radius**(-1/a) - 1, which is too large for a float where a is small
        log_power = -math.log(radius) / a
        spread = math.inf if log_power > 700.0 else math.expm1(log_power)
        square = spread * cosine * cosine
        if square == 0.0:
            return 0.5
        return 0.5 + 0.5 * math.copysign(1.0, cosine) / math.sqrt(1.0 + 1.0 / square)

    @cached_property
    def _key(self) -> int:
        return mix(mix(mix(self._seed + GOLDEN) + self._epoch) + self._sample)
