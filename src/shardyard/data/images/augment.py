"""From a decoded picture to the pixels of a sample: one way to learn from it, one to be judged by.

Shape suffixes in this file: H, W = rows and columns of pixels, C = red, green and blue
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardyard.data.images.crops import Range, middle, random_crop, random_part, resized
from shardyard.data.images.keyed_rng import Draws, Place
from shardyard.data.images.rand_augment import Picture, rand_augment

Pixels = npt.NDArray[np.uint8]

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
"""``data.images.interpolation`` -> Pillow's, which weighs all pixels that a smaller one covers."""


class View(Protocol):
    """What a split makes of a picture. Safe to use from several threads."""

    def __call__(self, picture: Picture, *, epoch: int, sample: int) -> Pixels:
        """A picture in RGB -> (H, W, C); the same of the same sample in the same epoch."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Other pixels of a picture in every epoch: crop, flip, RandAugment, erasing, in this order."""

    seed: int
    size: int
    """Rows and columns of a sample."""
    how: Image.Resampling
    area: Range
    """Of the crop, as shares of the picture's."""
    ratio: Range
    """Of the crop's width to its height."""
    flip: float
    """Probability of a mirrored picture."""
    operations: int
    """Of RandAugment, in a row."""
    magnitude: int
    """Of each of them."""
    erase: float
    """Probability that a part is erased."""
    erased_to: tuple[int, int, int]
    """Colour of what is erased."""

    def __call__(self, picture: Picture, *, epoch: int, sample: int) -> Pixels:
        """A picture in RGB -> (H, W, C)."""
        draws = Draws(self.seed, epoch, sample)
        box = random_crop(*picture.size, area=self.area, ratio=self.ratio, draws=draws)
        picture = picture.crop(box.corners).resize((self.size, self.size), self.how)
        if draws.share(Place.FLIP, 0) < self.flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        picture = rand_augment(
            picture, number=self.operations, magnitude=self.magnitude, how=self.how, draws=draws
        )
        if draws.share(Place.ERASE, 0) < self.erase:
            part = random_part(self.size, self.size, draws)
            if part is not None:
                picture.paste(self.erased_to, part.corners)
        return np.asarray(picture)


@dataclass(frozen=True, kw_only=True)
class MiddleCrop:
    """The middle of a picture, the same each time: what a model is judged by."""

    size: int
    """Rows and columns of a sample."""
    share: float
    """Of the shorter side, that is seen."""
    how: Image.Resampling

    def __call__(self, picture: Picture, *, epoch: int, sample: int) -> Pixels:  # noqa: ARG002
        """A picture in RGB -> (H, W, C)."""
        whole = resized(*picture.size, shorter=round(self.size / self.share))
        picture = picture.resize(whole, self.how)
        return np.asarray(picture.crop(middle(*whole, size=self.size).corners))
