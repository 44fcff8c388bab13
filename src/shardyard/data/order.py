"""The order of samples and the random numbers of each, as functions of keys without state.

The order is a keyed permutation. A balanced Feistel network permutes the numbers below a power of
four; walking along its cycles until a number falls below the wanted length turns it into a
permutation of any length. Memory does not grow with the data, and one position is computed without
the positions before it.

Sources: Luby and Rackoff 1988, doi:10.1137/0217022 (Feistel networks make permutations of keyed
functions); Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9 (any length, by cycle walking).
The round function is the finaliser of SplitMix64: Steele, Lea and Flood 2014,
doi:10.1145/2660193.2660195. This order is mixed well, not secret.

A random number depends only on (seed, epoch, sample, place), not on another draw, on the process
or on the order of asking. So every number of processes and threads sees the same pixels, and a
resume needs no replay.
"""

import math
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
SampleKey = tuple[int, int]
"""Index of a sample in its split, and the pass over the split, the first being 0."""

_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
_NUM_ROUNDS = 8
_MIN_HALF_BITS = 3
"""Feistel networks on fewer bits reach few of the permutations there are."""


def permute(position: int, length: int, *, key: int) -> int:
    """Number at ``position`` of the permutation of ``range(length)`` that belongs to ``key``.

    The slow, obvious form that ``permute_many`` is held to.

    Args:
        length: From 1 to 2**62.
        key: Any integer; its lowest 64 bits count.
    """
    assert 0 <= position < length <= 2**62, (position, length)
    half_bits = _half_bits(length)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & half_mask
        for round_key in _round_keys(key):
            left, right = right, left ^ (mix(right ^ round_key) & half_mask)
        position = left << half_bits | right
        if position < length:
            return position


def permute_many(positions: Positions, length: int, *, key: int | Keys) -> Positions:
    """``permute`` for many positions at once.

    Args:
        key: Of all positions, or one for each.
    """
    half_bits = np.uint64(_half_bits(length))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    keys = np.full(len(positions), key & _MASK, np.uint64) if isinstance(key, int) else key
    numbers = positions.astype(np.uint64)
    walking = np.arange(len(numbers))
    while len(walking):
        left, right = numbers[walking] >> half_bits, numbers[walking] & half_mask
        for number in range(_NUM_ROUNDS):
            round_keys = mix_many(keys[walking] + np.uint64((number + 1) * GOLDEN & _MASK))
            left, right = right, left ^ (mix_many(right ^ round_keys) & half_mask)
        numbers[walking] = left << half_bits | right
        walking = walking[numbers[walking] >= length]
    return numbers.astype(np.int64)


def sample_index(position: int, num_samples: int, *, seed: int) -> int:
    """Sample at ``position`` of the endless stream in which every epoch has its own order."""
    epoch, position_in_epoch = divmod(position, num_samples)
    return permute(position_in_epoch, num_samples, key=epoch_key(seed, epoch))


def sample_indices(positions: Positions, num_samples: int, *, seed: int) -> Positions:
    """``sample_index`` for many positions at once."""
    epochs, positions_in_epoch = np.divmod(positions, num_samples)
    return permute_many(positions_in_epoch, num_samples, key=epoch_keys(seed, epochs))


def _half_bits(length: int) -> int:
    return max(_MIN_HALF_BITS, ((length - 1).bit_length() + 1) // 2)


def _round_keys(key: int) -> list[int]:
    return [mix(key + (number + 1) * GOLDEN) for number in range(_NUM_ROUNDS)]


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key for the order of an epoch."""
    return mix(mix(seed + GOLDEN) + epoch)


def epoch_keys(seed: int, epochs: Positions) -> Keys:
    """Return the key of each epoch in a list that has one entry for each position."""
    passed, which = np.unique(epochs, return_inverse=True)
    keys = np.array([epoch_key(seed, int(epoch)) for epoch in passed], np.uint64)
    return keys[which]


def mix(number: int) -> int:
    """64 bits, each of which depends on every bit of a number: SplitMix64's finaliser."""
    number &= _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def mix_many(numbers: Keys) -> Keys:
    """``mix`` for many numbers at once."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


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
