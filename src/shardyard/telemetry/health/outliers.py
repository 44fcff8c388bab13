"""Detection of slow units among peers, against each unit's usual time: block by block.

The numbers are logarithms of seconds, so that a deviation of 0.1 is 10 % for any timing.
What all peers share (longer samples, a busy switch) cancels. A lasting difference of one of
them (a slower board, a smaller share of work) is its baseline. The threshold of a deviation
is learnt from the past deviations: their spread, and the largest that lasted for some
blocks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

HISTORY = 64
"""Blocks from which a unit's usual deviation is known, the newest ones."""
FEWEST = 6
"""Fewest blocks of history before changes are detected."""
_BLIND = 2
"""Blocks from which no spread is known yet."""
FLOOR = 0.05
"""Smallest change to report: half of the smallest that matters."""
_SPREADS = 4.0
"""Standard deviations of a block."""
_LASTED = 1.5
"""Times the largest deviation so far that lasted as many blocks as must speak for one."""
_LEVEL_SPREADS = 1.5
"""Times the threshold of a change, before a level counts that was always there."""
_LOOKS = ((0.075, 2), (0.15, 3))
"""Up to this threshold, so many blocks in a row are enough; beyond, ``_MOST_LOOKS``."""
_MOST_LOOKS = 6
_CLEAR = ((2.0, 3), (4.0, 2))
"""Larger thresholds, as multiples, each with the fewer blocks that are then enough.

They do not apply where others use the same processor in bursts: there the threshold is
beyond those of ``_LOOKS``.
"""
_BACK = 0.5
"""Fraction of the threshold below which a unit is back to normal."""
_MAD = 1.4826
"""Standard deviations in a median absolute deviation of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class OutlierTransition:
    """A unit is slow from now on, or is no more."""

    unit: int
    deviation: float
    """Logarithm of how many times as long as usual it takes now; usual for its peers, where the
    level was always there."""
    is_over: bool
    is_level: bool
    """Whether it is reported for its level compared with its peers, not for a change."""
    is_since_start: bool
    """It has stood there in every block so far."""


class OutlierDetector:
    """Deviations of units that are compared with each other.

    Args:
        groups: Group number of each unit; units of one group are compared.
        level: Ratio of a unit's time to its peers', above which it is reported without a change.
        least_s: Smallest increase over the usual time, in seconds, that is reported.
        min_blocks: Fewest blocks in a row that show a change, also where all is quiet.
        is_bursty: Whether the timed work shares a processor with others.
    """

    def __init__(
        self,
        groups: Ints,
        *,
        level: float,
        least_s: float,
        min_blocks: int = 2,
        is_bursty: bool = True,
    ) -> None:
        count = len(groups)
        self._members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
        self._level = float(np.log(level))
        self._least_s = least_s
        self._min_blocks = min_blocks
        self._is_bursty = is_bursty
        self._typical = np.full((HISTORY, count), np.nan)
        self._lasted = np.zeros((HISTORY, count))
        self._taken = np.zeros(count, dtype=np.int64)
        self._recent = np.zeros((min_blocks - 1, count))
        """Changes of the blocks before, as many as must last with the next one."""
        self._pending: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        """Suspicious blocks: they count as usual only once the suspicion has come to an end."""
        self._num_blocks = 0
        self._row = np.zeros(count, dtype=np.int64)
        self._weakest = np.full(count, np.inf)
        """Least change, in thresholds, of the blocks in that row."""
        self._level_row = np.zeros(count, dtype=np.int64)
        self._back_row = np.zeros(count, dtype=np.int64)
        self._named = np.zeros(count, dtype=np.bool_)
        self._is_level = np.zeros(count, dtype=np.bool_)

    @property
    def named(self) -> Ints:
        """Units that are currently reported as slow."""
        return np.flatnonzero(self._named)

    def update(self, steps_s: Floats) -> list[OutlierTransition]:
        """Take in a block: by step, what each unit took; returns what is new.

        Units are compared step by step: a long step is long for all of them, and cancels.
        """
        deviation = np.median(self._against_peers(np.log(np.maximum(steps_s, 1e-9))), axis=0)
        seconds = np.median(steps_s, axis=0)
        usual, limit, peers_limit = self._reference()
        change = deviation - usual
        self._num_blocks += 1
        is_known = self._taken >= FEWEST
        worth = self._is_worth(seconds, change)
        # What only comes up to its peers makes no step longer; of two, one that is well again would
        # make the other one seem slow.
        is_above = deviation > _BACK * limit
        is_far = is_known & (change > limit) & is_above & worth
        # Its own spread may hold the step up itself, where that came before there was a baseline.
        far_level = np.maximum(self._level, _LEVEL_SPREADS * peers_limit)
        is_high = (deviation > far_level) & self._is_worth(seconds, deviation)
        self._row = np.where(is_far, self._row + 1, 0)
        strength = np.where(is_far, change / limit, np.inf)
        self._weakest = np.where(self._row > 1, np.minimum(self._weakest, strength), strength)
        self._level_row = np.where(is_high, self._level_row + 1, 0)
        is_clear = (limit <= _LOOKS[-1][0]) | (not self._is_bursty)
        strength = np.where(is_clear, self._weakest, 1.0)
        needed = np.maximum(blocks_needed(limit, strength), self._min_blocks)
        turns = self._started(deviation, change, needed)
        turns += self._ended(deviation, change, np.where(self._is_level, peers_limit, limit))
        # Where half of the peers become slow, the other half seems quick: that is not usual either.
        seems_quick = is_known & (change < -limit)
        self._learn(deviation, change, is_far | is_high, seems_quick)
        return turns

    def _started(self, deviation: Floats, change: Floats, needed: Ints) -> list[OutlierTransition]:
        by_change = (self._row >= needed) & ~self._named
        by_level = (self._level_row >= _MOST_LOOKS) & ~self._named & ~by_change
        self._named |= by_change | by_level
        self._is_level = np.where(by_change, False, self._is_level | by_level)
        self._back_row[by_change | by_level] = 0
        return [
            OutlierTransition(
                unit=int(unit),
                deviation=float(deviation[unit] if by_level[unit] else change[unit]),
                is_over=False,
                is_level=bool(by_level[unit]),
                is_since_start=bool(
                    by_level[unit] and self._level_row[unit] >= self._num_blocks - _BLIND
                ),
            )
            for unit in np.flatnonzero(by_change | by_level)
        ]

    def _ended(self, deviation: Floats, change: Floats, limit: Floats) -> list[OutlierTransition]:
        above = np.where(self._is_level, deviation, change)
        bound = np.where(self._is_level, np.maximum(self._level, limit), limit)
        is_back = self._named & (above < _BACK * bound)
        self._back_row = np.where(is_back, self._back_row + 1, 0)
        over = self._named & (self._back_row >= blocks_needed(limit))
        self._named &= ~over
        self._row[over] = self._level_row[over] = 0
        self._forget(np.flatnonzero(over & self._is_level))
        return [
            OutlierTransition(
                unit=int(unit),
                deviation=float(above[unit]),
                is_over=True,
                is_level=bool(self._is_level[unit]),
                is_since_start=False,
            )
            for unit in np.flatnonzero(over)
        ]

    def _learn(
        self, deviation: Floats, change: Floats, is_suspicious: Any, is_excluded: Any
    ) -> None:
        """Put what is usual into the history; what is suspicious waits until that is over."""
        lasted = np.maximum(np.minimum(change, self._recent.min(axis=0)), 0.0)
        lasted[self._taken < FEWEST] = 0.0  # there is no change without a baseline
        self._recent = np.vstack([self._recent[1:], change])
        waits = is_suspicious & (self._taken >= FEWEST)
        for unit in np.flatnonzero(waits & ~self._named):
            self._pending[unit].append((deviation[unit], lasted[unit]))
        for unit in np.flatnonzero(~waits):
            if self._pending[unit]:
                for each in self._pending[unit]:
                    self._put(np.array([unit]), *each)
                self._pending[unit].clear()
        for unit in np.flatnonzero(self._named):
            self._pending[unit].clear()
        units = np.flatnonzero(~waits & ~self._named & ~is_excluded)
        self._put(units, deviation[units], lasted[units])

    def _forget(self, units: Ints) -> None:
        """Forget the usual times of units that have moved."""
        self._typical[:, units] = np.nan
        self._lasted[:, units] = 0.0
        self._taken[units] = 0

    def _put(self, units: Ints, deviation: Any, lasted: Any) -> None:
        rows = self._taken[units] % HISTORY
        self._typical[rows, units] = deviation
        self._lasted[rows, units] = lasted
        self._taken[units] += 1

    def _reference(self) -> tuple[Floats, Floats, Floats]:
        """Return usual deviation, limit, and limit by peers of each unit.

        A block with a change beyond the limit is suspicious. The limit by peers uses only the usual
        values of the unit's peers.
        """
        counts = np.minimum(self._taken, HISTORY)
        if counts.max() == 0:
            nothing = np.zeros(len(counts))
            return nothing, nothing + np.inf, nothing + np.inf
        usual = _medians(self._typical, counts)
        spread = _MAD * _medians(np.abs(self._typical - usual), counts)
        lasted = self._lasted.max(axis=0)
        by_peers = np.maximum(_SPREADS * self._middle(spread), _LASTED * self._middle(lasted))
        by_peers = np.where(counts < _BLIND, np.inf, np.maximum(by_peers, FLOOR))
        limit = np.maximum.reduce([by_peers, _SPREADS * spread, _LASTED * lasted])
        return usual, limit, by_peers

    def _middle(self, values: Floats) -> Floats:
        """Return, for each unit, the median among those it is compared with."""
        found = np.empty_like(values)
        for members in self._members:
            found[members] = np.median(values[members])
        return found

    def _against_peers(self, logs: Floats) -> Floats:
        found = np.zeros_like(logs)
        for members in self._members:
            if len(members) > 1:
                found[:, members] = logs[:, members] - medians_of_others(logs[:, members])
        return found

    def _is_worth(self, seconds: Floats, change: Floats) -> npt.NDArray[np.bool_]:
        worth: npt.NDArray[np.bool_] = seconds * -np.expm1(-change) >= self._least_s
        return worth


def blocks_needed(limit: Floats, strength: Floats | float = 1.0) -> Ints:
    """Blocks in a row that speak for a change; more where a machine is loud.

    Args:
        limit: The threshold.
        strength: The least change in the row, in thresholds.
    """
    found = np.full(limit.shape, _MOST_LOOKS, dtype=np.int64)
    for times, looks in _CLEAR:
        found[np.asarray(strength) >= times] = looks
    for bound, looks in reversed(_LOOKS):
        found[limit <= bound] = np.minimum(found[limit <= bound], looks)
    return found


def medians_of_others(values: Floats) -> Floats:
    """Along the last axis, of each of two or more the median of all others."""
    count = values.shape[-1]
    order = np.argsort(values, axis=-1)
    ordered = np.take_along_axis(values, order, axis=-1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(count), order.shape), axis=-1)
    low, high = (count - 2) // 2, (count - 1) // 2
    below = np.take_along_axis(ordered, low + (place <= low), axis=-1)
    above = np.take_along_axis(ordered, high + (place <= high), axis=-1)
    return np.asarray((below + above) / 2, dtype=np.float64)


def _medians(values: Floats, counts: Ints) -> Floats:
    """Return each column's median, of as many values as it has; 0 where it has none."""
    ordered = np.sort(values, axis=0)  # what is not there yet is NaN, and sorts last
    columns = np.arange(values.shape[1])
    low = ordered[np.maximum(counts - 1, 0) // 2, columns]
    high = ordered[counts // 2 % len(values), columns]
    found = (low + high) / 2
    return np.where(counts > 0, found, 0.0)
