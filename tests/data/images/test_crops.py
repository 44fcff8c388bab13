"""Boxes: torchvision's from the same draws, and spread as their definition says."""

import math

import numpy as np
import pytest

from shardyard.data.images.crops import (
    ERASED_AREA,
    ERASED_RATIO,
    Range,
    center_square,
    random_crop,
    random_erase_box,
    resized_shape,
)
from shardyard.data.order import KeyedRng

USUAL: tuple[Range, Range] = ((0.08, 1.0), (3 / 4, 4 / 3))


@pytest.mark.parametrize(
    ("width", "height", "area", "ratio", "boxes"),
    [
        (500, 375, *USUAL, [(109, 27, 209, 256), (199, 97, 276, 250), (22, 32, 296, 340)]),
        (8, 8, *USUAL, [(1, 0, 4, 5), (3, 3, 5, 5), (0, 2, 5, 6)]),
        # nothing fits: the middle, as large as the ratio allows
        (33, 200, (0.9, 1.0), (0.5, 2.0), [(0, 67, 33, 66)] * 3),
        (640, 60, (0.35, 1.0), (0.9, 1.1), [(287, 0, 66, 60)] * 3),
    ],
)
def test_a_crop_is_what_torchvision_makes_of_the_same_draws(
    width: int, height: int, area: Range, ratio: Range, boxes: list[tuple[int, ...]]
) -> None:
    """Boxes of samples 0 to 2 in RandomResizedCrop.get_params of torchvision 0.29.2."""
    ours = [
        random_crop(width, height, area=area, ratio=ratio, rng=KeyedRng(0, 0, sample))
        for sample in range(3)
    ]
    assert ours == boxes


def test_area_and_shape_of_crops_are_spread_as_their_bounds_say() -> None:
    # so small beside the picture that no box is refused, which would bend the distribution
    area, ratio = (0.05, 0.2), (0.5, 2.0)
    boxes = [
        random_crop(4000, 3000, area=area, ratio=ratio, rng=KeyedRng(1, 0, sample))
        for sample in range(4000)
    ]
    areas = np.array([box.width * box.height for box in boxes]) / 12_000_000
    shapes = np.log2([box.width / box.height for box in boxes])
    wide = 4 / math.sqrt(12 * len(boxes))  # four deviations of a mean, of a range of 1
    assert abs(areas.mean() - 0.125) < 0.15 * wide
    assert areas.var() == pytest.approx(0.15**2 / 12, rel=0.08)
    assert abs(shapes.mean()) < 2 * wide and shapes.var() == pytest.approx(4 / 12, rel=0.08)
    assert areas.min() >= 0.0499 and areas.max() <= 0.2001
    # and any place is as likely as any other
    places = [box.left / (4000 - box.width) for box in boxes]
    assert abs(np.mean(places) - 0.5) < wide


def test_a_crop_never_leaves_its_picture() -> None:
    for sample in range(300):
        for width, height in ((1, 1), (1, 90), (7, 3)):
            box = random_crop(
                width, height, area=USUAL[0], ratio=USUAL[1], rng=KeyedRng(0, sample, 5)
            )
            left, top, right, bottom = box.corners
            assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_an_erased_part_keeps_its_bounds_and_leaves_a_border() -> None:
    parts = [random_erase_box(224, 160, KeyedRng(0, 0, sample)) for sample in range(500)]
    found = [part for part in parts if part is not None]
    assert len(found) == 500
    for part in found:
        assert part.width < 224 and part.height < 160
        assert part.left + part.width <= 224 and part.top + part.height <= 160
        assert ERASED_AREA[0] * 0.9 < part.width * part.height / (224 * 160) < ERASED_AREA[1] * 1.05
        assert ERASED_RATIO[0] * 0.9 < part.width / part.height < ERASED_RATIO[1] * 1.1


def test_nothing_is_erased_where_nothing_fits() -> None:
    assert random_erase_box(1, 1, KeyedRng(0, 0, 0)) is None


def test_the_middle_of_an_odd_remainder_is_rounded_as_torchvision_rounds() -> None:
    assert resized_shape(500, 375, shorter=256) == (341, 256)
    assert center_square(341, 256, size=224) == (58, 16, 224, 224)  # round(58.5) is 58
    assert center_square(343, 256, size=224).left == 60  # round(59.5) is 60
