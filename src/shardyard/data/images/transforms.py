"""Transforms of a recipe's pictures, for training and for validation.

Pillow is imported when a view is made: code that reads text does without.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardyard.config.schema.data import Images
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.crops import (
    Range,
    center_square,
    random_crop,
    random_erase_box,
    resized_shape,
)
from shardyard.data.images.mixup import Mixing
from shardyard.data.images.rand_augment import PilImage, rand_augment
from shardyard.data.order import KeyedRng, RngPurpose
from shardyard.data.readers.read_errors import extra
from shardyard.data.samples import Prepare, identity_prepare


def train_view(recipe: Recipe) -> "ImageTransform":
    """Another view of a picture in every epoch.

    Raises:
        RequestError: Pillow is not installed.
    """
    extra("images", "PIL.Image", what="A picture")

    images = recipe.data.images
    red, green, blue = (round(255 * mean) for mean in images.mean)
    return Augmentation(
        seed=recipe.run.seed,
        size=_size(images),
        resample=INTERPOLATIONS[images.interpolation],
        area=images.crop_area,
        ratio=images.crop_ratio,
        flip=images.flip,
        operations=images.rand_augment,
        magnitude=images.rand_augment_magnitude,
        erase=images.erase,
        erased_to=(red, green, blue),
    )


def eval_view(recipe: Recipe) -> "ImageTransform":
    """The same view each time.

    Raises:
        RequestError: Pillow is not installed.
    """
    extra("images", "PIL.Image", what="A picture")

    images = recipe.data.images
    how = INTERPOLATIONS[images.interpolation]
    return CenterCrop(size=_size(images), share=images.eval_crop, resample=how)


def train_mixing(recipe: Recipe) -> Prepare:
    """Return the mixing of a micro-batch to train on."""
    images = recipe.data.images
    if not images.mixes:
        return identity_prepare
    return Mixing(
        seed=recipe.run.seed, size=_size(images), mixup=images.mixup, cutmix=images.cutmix
    )


def _size(images: Images) -> int:
    assert isinstance(images.size, int), "resolved"
    return images.size


# From a decoded picture to the pixels of a sample: one way to learn from it, one to be judged by.
#
# Shape suffixes in this file: H, W = rows and columns of pixels, C = red, green and blue

Pixels = npt.NDArray[np.uint8]

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
"""``data.images.interpolation`` -> Pillow's, which weighs all pixels that a smaller one covers."""


class ImageTransform(Protocol):
    """Transform of a split's pictures. Safe to use from several threads."""

    def __call__(self, image: PilImage, *, epoch: int, sample: int) -> Pixels:
        """A picture in RGB -> (H, W, C); the same of the same sample in the same epoch."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Other pixels of a picture in every epoch: crop, flip, RandAugment, erasing, in this order."""

    seed: int
    size: int
    """Rows and columns of a sample."""
    resample: Image.Resampling
    area: Range
    """Range of the crop's area, as shares of the picture's."""
    ratio: Range
    """Range of the crop's width divided by its height."""
    flip: float
    """Probability of a mirrored picture."""
    operations: int
    """Number of RandAugment's operations in a row."""
    magnitude: int
    """Magnitude of each of them."""
    erase: float
    """Probability that a part is erased."""
    erased_to: tuple[int, int, int]
    """Colour of what is erased."""

    def __call__(self, image: PilImage, *, epoch: int, sample: int) -> Pixels:
        """A picture in RGB -> (H, W, C)."""
        rng = KeyedRng(self.seed, epoch, sample)
        box = random_crop(*image.size, area=self.area, ratio=self.ratio, rng=rng)
        image = image.crop(box.corners).resize((self.size, self.size), self.resample)
        if rng.uniform(RngPurpose.FLIP, 0) < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = rand_augment(
            image, number=self.operations, magnitude=self.magnitude, resample=self.resample, rng=rng
        )
        if rng.uniform(RngPurpose.ERASE, 0) < self.erase:
            part = random_erase_box(self.size, self.size, rng)
            if part is not None:
                image.paste(self.erased_to, part.corners)
        return np.asarray(image)


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """The middle of a picture, the same each time: what a model is judged by."""

    size: int
    """Rows and columns of a sample."""
    share: float
    """Share of the shorter side that is seen."""
    resample: Image.Resampling

    def __call__(self, image: PilImage, *, epoch: int, sample: int) -> Pixels:  # noqa: ARG002
        """A picture in RGB -> (H, W, C)."""
        whole = resized_shape(*image.size, shorter=round(self.size / self.share))
        image = image.resize(whole, self.resample)
        return np.asarray(image.crop(center_square(*whole, size=self.size).corners))
