"""Choose the part of an image to take or erase, without touching a pixel.

The definitions are torchvision's (RandomResizedCrop, Resize and CenterCrop, RandomErasing,
of torchvision 0.29), so that a recipe of the field means here what it means there.
"""

import math
from typing import NamedTuple

from shardyard.data.order import KeyedRng, RngPurpose

Range = tuple[float, float]

_TRIES = 10
ERASED_AREA: Range = (0.02, 0.33)
"""Shares of the image."""
ERASED_RATIO: Range = (1 / 3.3, 1 / 0.3)
"""Width to height, where arXiv:1708.04896, section 3.2, has height to width."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    @property
    def corners(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom, as Pillow takes them."""
        return self.left, self.top, self.left + self.width, self.top + self.height


def random_crop(width: int, height: int, *, area: Range, ratio: Range, rng: KeyedRng) -> Box:
    """A box of random area and shape, somewhere in the image (arXiv:1409.4842, section 6).

    After ten boxes that do not fit, the largest box in the middle that keeps within ``ratio``.

    Args:
        area: Of the box, as shares of the image's.
        ratio: Of its width to its height; drawn so that twice and half are alike.
    """
    for number in range(_TRIES):
        box = _sample_box(width, height, area, ratio, RngPurpose.CROP, 4 * number, rng)
        if 0 < box.width <= width and 0 < box.height <= height:
            return box
    if width / height < ratio[0]:
        size = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        size = round(height * ratio[1]), height
    else:
        size = width, height
    return Box((width - size[0]) // 2, (height - size[1]) // 2, *size)


def random_erase_box(width: int, height: int, rng: KeyedRng) -> Box | None:
    """Draw the part that random erasing erases, which is never the whole width or height.

    None: ten boxes did not fit, and no part is erased.
    """
    for number in range(_TRIES):
        counter = 1 + 4 * number  # 0 says whether anything is erased
        box = _sample_box(width, height, ERASED_AREA, ERASED_RATIO, RngPurpose.ERASE, counter, rng)
        if 0 < box.width < width and 0 < box.height < height:
            return box
    return None


def resized_shape(width: int, height: int, *, shorter: int) -> tuple[int, int]:
    """Width and height with that shorter side, the longer one rounded down."""
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter


def center_square(width: int, height: int, *, size: int) -> Box:
    """The square in the middle of an image that is no smaller."""
    return Box(round((width - size) / 2), round((height - size) / 2), size, size)


def _sample_box(
    width: int,
    height: int,
    area: Range,
    ratio: Range,
    purpose: RngPurpose,
    number: int,
    rng: KeyedRng,
) -> Box:
    """A box that may not fit; takes four draws from ``number``."""
    pixels = width * height * rng.uniform_between(purpose, number, *area)
    shape = math.exp(
        rng.uniform_between(purpose, number + 1, math.log(ratio[0]), math.log(ratio[1]))
    )
    box_width, box_height = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
    left = rng.randint(purpose, number + 2, max(0, width - box_width) + 1)
    top = rng.randint(purpose, number + 3, max(0, height - box_height) + 1)
    return Box(left, top, box_width, box_height)
