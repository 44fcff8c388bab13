"""The order of samples: a keyed permutation, so that the data order has no state.

A balanced Feistel network permutes the numbers below a power of four; walking along its cycles
until a number falls below the wanted length turns it into a permutation of any length. Memory does
not grow with the data, and one position is computed without the positions before it.

Sources: Luby and Rackoff 1988, doi:10.1137/0217022 (Feistel networks make permutations of keyed
functions); Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9 (any length, by cycle walking).
The round function is the finaliser of SplitMix64: Steele, Lea and Flood 2014,
doi:10.1145/2660193.2660195. This order is mixed well, not secret.
"""

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

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
