"""The order of pictures in blocks: each once an epoch, near each other within a window."""

from collections import Counter

import numpy as np
import pytest

from shardyard.data.images.commit import choose_window
from shardyard.data.images.index import ROW
from shardyard.data.images.order import Window, window_index, window_indices
from shardyard.data.order import sample_indices

SMALL = Window(block=4, lane_blocks=2, lanes=3, run=2)
USUAL = Window(block=32)


@pytest.mark.parametrize("num_samples", [1, 3, 4, 23, 24, 25, 47, 48, 100, 239, 241])
@pytest.mark.parametrize("seed", [0, 7])
def test_every_picture_appears_once_in_every_epoch(num_samples: int, seed: int) -> None:
    positions = np.arange(3 * num_samples)
    found = window_indices(positions, num_samples, SMALL, seed=seed).reshape(3, -1)
    assert (np.sort(found) == np.arange(num_samples)).all()


@pytest.mark.parametrize("num_samples", [5, 24, 100, 10_000])
def test_the_fast_form_equals_the_slow_one(num_samples: int) -> None:
    for window in (SMALL, USUAL):
        positions = np.unique(np.linspace(0, 3 * num_samples - 1, 200, dtype=np.int64))
        slow = [window_index(each, num_samples, window, seed=5) for each in positions.tolist()]
        assert window_indices(positions, num_samples, window, seed=5).tolist() == slow


def test_blocks_of_one_picture_are_the_order_of_all_other_data() -> None:
    positions = np.arange(200)
    found = window_indices(positions, 100, Window(block=1), seed=3)
    assert (found == sample_indices(positions, 100, seed=3)).all()


@pytest.mark.parametrize(("num_samples", "block"), [(2, 2), (39, 32), (4095, 2048), (10_000, 4096)])
def test_a_block_is_no_larger_than_a_small_split(num_samples: int, block: int) -> None:
    rows = np.zeros(num_samples, ROW)
    rows["size"], rows["label"] = 800, np.random.default_rng(0).integers(0, 4, num_samples)
    assert choose_window(rows).block == block


def test_a_window_holds_no_more_blocks_than_it_says() -> None:
    num_samples = 10 * USUAL.samples
    order = window_indices(np.arange(num_samples), num_samples, USUAL, seed=1)
    blocks = order.reshape(10, -1) // USUAL.block
    assert [len(np.unique(row)) for row in blocks] == [USUAL.blocks] * 10


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_where_micro_batches_match_the_lanes_each_block_is_read_by_one_rank(
    world_size: int,
) -> None:
    micro_batch = 32
    num_samples = 4 * USUAL.samples
    order = window_indices(np.arange(num_samples), num_samples, USUAL, seed=1)
    ranks = np.arange(num_samples) // micro_batch % world_size
    readers = Counter(block for _, block in set(zip(ranks, order // USUAL.block, strict=True)))
    assert set(readers.values()) == {1}


def test_the_order_never_changes() -> None:
    """Pinned on 2026-11-23: another order would make a resumed run read pictures twice."""
    found = window_indices(np.arange(26), 26, SMALL, seed=1234)
    pinned = [
        10,
        11,
        14,
        6,
        0,
        1,
        16,
        17,
        15,
        13,
        2,
        23,
        18,
        8,
        4,
        7,
        3,
        22,
        19,
        9,
        12,
        5,
        24,
        25,
        20,
        21,
    ]
    assert found.tolist() == pinned


def test_a_batch_mixes_classes_as_drawing_from_all_does() -> None:
    """Pictures are packed in a mixed order: what a window adds is that blocks stay together."""
    num_samples, classes, batch = 8 * USUAL.samples, 8, 256
    labels = np.random.default_rng(0).integers(0, classes, num_samples)
    order = window_indices(np.arange(num_samples), num_samples, USUAL, seed=2)
    counts = [np.bincount(each, minlength=classes) for each in labels[order].reshape(-1, batch)]
    chi_square = float(((np.array(counts) - batch / classes) ** 2 / (batch / classes)).sum())
    degrees = len(counts) * (classes - 1)
    assert abs(chi_square - degrees) < 4.5 * (2 * degrees) ** 0.5
