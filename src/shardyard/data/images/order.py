"""Order of pictures that lie in blocks: mixed within a window that a cache can hold.

Reading a single picture, wherever it lies, costs a request or a seek. So the pictures of a
split count as blocks of neighbours, each read at once. An epoch permutes the blocks and
cuts them into windows. A window deals its blocks into lanes, and permutes the pictures of
each lane. Positions take turns: ``run`` of the first lane, ``run`` of the next. Ranks read
micro-batches in turn too. Where these match, each rank meets the blocks of some lanes and
leaves the others to other ranks.

Any position is computed without those before it, as in ``data/order.py``.
"""

from dataclasses import dataclass

import numpy as np

from shardyard.data.order import (
    GOLDEN,
    Keys,
    Positions,
    epoch_key,
    epoch_keys,
    mix,
    mix_many,
    permute,
    permute_many,
    sample_indices,
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Mixing of pictures, settled when they are prepared."""

    block: int
    """Pictures that lie side by side and are read at once; 1: each is read separately, and the
    order is the wholly mixed one of ``data/order.py``.
    """
    lane_blocks: int = 4
    """Blocks that a lane mixes."""
    lanes: int = 16
    run: int = 16
    """Positions in a row that one lane serves; divides the pictures of a lane."""

    @property
    def lane_samples(self) -> int:
        return self.block * self.lane_blocks

    @property
    def blocks(self) -> int:
        """Blocks of a whole window."""
        return self.lane_blocks * self.lanes

    @property
    def samples(self) -> int:
        """Samples of a whole window."""
        return self.block * self.blocks


def window_index(position: int, num_samples: int, window: Window, *, seed: int) -> int:
    """Picture at ``position`` of the endless stream: the slow, obvious form."""
    epoch, position = divmod(position, num_samples)
    key = epoch_key(seed, epoch)
    num_blocks = -(-num_samples // window.block)
    # The last block may be ragged. Places behind it are walked over, as `permute` does.
    while True:
        number, place = divmod(position, window.samples)
        left = num_blocks - number * window.blocks
        if left >= window.blocks:
            run, place_in_run = divmod(place, window.run)
            turn, lane = divmod(run, window.lanes)
            lane_key = _lane_key(key, number * window.lanes + lane)
            place = permute(turn * window.run + place_in_run, window.lane_samples, key=lane_key)
            place += lane * window.lane_samples
        else:  # what is left is no window: mixed as a whole
            lane_key = _lane_key(key, number * window.lanes)
            place = permute(place, left * window.block, key=lane_key)
        slot, place_in_block = divmod(place, window.block)
        block = permute(number * window.blocks + slot, num_blocks, key=key)
        position = block * window.block + place_in_block
        if position < num_samples:
            return position


def window_indices(
    positions: Positions, num_samples: int, window: Window, *, seed: int
) -> Positions:
    """``window_index`` for many positions at once."""
    if window.block == 1:
        return sample_indices(positions, num_samples, seed=seed)
    epochs, places = np.divmod(positions, num_samples)
    return _in_windows(places, num_samples, window, epoch_keys(seed, epochs))


def _in_windows(positions: Positions, num_samples: int, window: Window, keys: Keys) -> Positions:
    """From places in their epochs to pictures; each has its epoch's key."""
    num_blocks = -(-num_samples // window.block)
    whole_windows, left = divmod(num_blocks, window.blocks)
    found = positions.copy()
    walking = np.arange(len(found))
    while len(walking):
        numbers, within = np.divmod(found[walking], window.samples)
        of_epoch, whole = keys[walking], numbers < whole_windows
        rest_keys = _lane_keys(of_epoch[~whole], numbers[~whole] * window.lanes)
        slots = np.empty_like(numbers)
        slots[whole] = _in_lanes(numbers[whole], within[whole], window, of_epoch[whole])
        slots[~whole] = permute_many(within[~whole], left * window.block, key=rest_keys)
        slot, place_in_block = np.divmod(slots, window.block)
        blocks = permute_many(numbers * window.blocks + slot, num_blocks, key=of_epoch)
        found[walking] = blocks * window.block + place_in_block
        walking = walking[found[walking] >= num_samples]
    return found


def _in_lanes(numbers: Positions, within: Positions, window: Window, keys: Keys) -> Positions:
    """Return the places in their windows from which pictures are taken, for whole windows."""
    runs, place_in_run = np.divmod(within, window.run)
    turns, lanes = np.divmod(runs, window.lanes)
    lane_keys = _lane_keys(keys, numbers * window.lanes + lanes)
    places = permute_many(turns * window.run + place_in_run, window.lane_samples, key=lane_keys)
    places += lanes * window.lane_samples
    return places


def _lane_key(key: int, number: int) -> int:
    return mix(key + (number + 1) * GOLDEN)


def _lane_keys(keys: Keys, numbers: Positions) -> Keys:
    """``_lane_key`` for many lanes, numbered through all windows."""
    return mix_many(keys + (numbers + 1).astype(np.uint64) * np.uint64(GOLDEN))
