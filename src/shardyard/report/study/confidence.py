"""Confidence in a mean step time, from the steps of one run: an interval by batch means.

Steps that follow each other are alike (caches, neighbours on the machine, clocks). Each of
them separately would count as more evidence than it is. So the steps are cut into a few
stretches of equal length, whose means hardly depend on each other. Student's t bounds how
far the mean of these may be from the truth (Law and Kelton, Simulation Modeling and
Analysis, batch means). The mean and not the median: a step that is slow now and then is
paid for too.

The interval leaves out differences from one run of the same size to the next (other nodes,
other neighbours): that takes several runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from shardyard.report.compare.statistics import t_half_width

SEGMENTS = 10
_MIN_SEGMENTS, _LEAST_STEPS = 4, 2
CONFIDENCE = 0.95
CONFIDENCE_WORDS = "95 % interval by batch means"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Uncertainty of a mean, as a share of it: on the logarithm, so that ratios are simple."""

    error: float
    """Standard error of the mean over the mean."""
    freedom: float
    """Degrees of freedom."""

    @property
    def factor(self) -> float:
        """The interval goes from the value over this to the value times this."""
        # of the whole number below where it is none: the next wider interval
        return math.exp(t_half_width(max(1, math.floor(self.freedom)), CONFIDENCE) * self.error)

    def combined_with(self, other: "Spread") -> "Spread":
        """Return the spread of the ratio of two independent means (Welch and Satterthwaite)."""
        squares = self.error**2, other.error**2
        total = sum(squares)
        if total == 0:
            return Spread(error=0.0, freedom=min(self.freedom, other.freedom))
        parts = squares[0] ** 2 / self.freedom + squares[1] ** 2 / other.freedom
        return Spread(error=math.sqrt(total), freedom=total**2 / parts)


def spread_of(seconds: Sequence[float]) -> Spread | None:
    """Return the spread of the mean of step times, given in order; None: too few steps."""
    stretches = min(SEGMENTS, len(seconds) // _LEAST_STEPS)
    if stretches < _MIN_SEGMENTS:
        return None
    size = len(seconds) // stretches
    kept = seconds[len(seconds) - size * stretches :]  # what is over is left out at the beginning
    means = [fmean(kept[first : first + size]) for first in range(0, len(kept), size)]
    error = stdev(means) / math.sqrt(stretches)
    return Spread(error=error / fmean(means), freedom=stretches - 1)
