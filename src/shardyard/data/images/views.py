"""What a recipe makes of pictures, of those that are learnt from and of those held out.

Pillow is imported when a view is made: what reads text does without.
"""

from typing import TYPE_CHECKING

from shardyard.config.schema.data import Images
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.mixup import Mixing
from shardyard.data.optional_imports import extra
from shardyard.data.samples import Prepare, unchanged

if TYPE_CHECKING:
    from shardyard.data.images.augment import View


def train_view(recipe: Recipe) -> "View":
    """Another view of a picture in every epoch.

    Raises:
        RequestError: Pillow is not installed.
    """
    extra("images", "PIL.Image", what="A picture")
    from shardyard.data.images.augment import INTERPOLATIONS, Augmentation

    images = recipe.data.images
    red, green, blue = (round(255 * mean) for mean in images.mean)
    return Augmentation(
        seed=recipe.run.seed,
        size=_size(images),
        how=INTERPOLATIONS[images.interpolation],
        area=images.crop_area,
        ratio=images.crop_ratio,
        flip=images.flip,
        operations=images.rand_augment,
        magnitude=images.rand_augment_magnitude,
        erase=images.erase,
        erased_to=(red, green, blue),
    )


def eval_view(recipe: Recipe) -> "View":
    """The same view each time.

    Raises:
        RequestError: Pillow is not installed.
    """
    extra("images", "PIL.Image", what="A picture")
    from shardyard.data.images.augment import INTERPOLATIONS, MiddleCrop

    images = recipe.data.images
    how = INTERPOLATIONS[images.interpolation]
    return MiddleCrop(size=_size(images), share=images.eval_crop, how=how)


def train_mixing(recipe: Recipe) -> Prepare:
    """What a micro-batch to learn from is mixed by."""
    images = recipe.data.images
    if not images.mixes:
        return unchanged
    return Mixing(
        seed=recipe.run.seed, size=_size(images), mixup=images.mixup, cutmix=images.cutmix
    )


def _size(images: Images) -> int:
    assert isinstance(images.size, int), "resolved"
    return images.size
