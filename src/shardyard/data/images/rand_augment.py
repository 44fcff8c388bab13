"""RandAugment: a few operations in a row, each drawn from a fixed list, all of one magnitude.

Source: Cubuk et al. 2019, arXiv:1909.13719. The paper names 14 operations and leaves open what a
magnitude means for each; the table here is torchvision's (RandAugment, of torchvision 0.29). At the
same strength an operation gives the same pixels; torchvision's strengths are rounded to fp32, ours
are not. What a shift lays bare is black.
"""

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageEnhance, ImageOps

from shardyard.data.order import KeyedRng, RngPurpose

PilImage = Image.Image

STRONGEST = 30
"""Magnitudes are whole numbers from 0 to this one."""

_SHIFT = 150.0 / 331.0
"""Largest shift, as a share of the side: AutoAugment's 150 pixels of 331 (arXiv:1805.09501)."""


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    apply: Callable[[PilImage, float, Image.Resampling], PilImage]
    """Picture, strength and interpolation -> picture of the same size."""
    strength: Callable[[float], float] = lambda share: 0.0  # noqa: ARG005 - it has none
    """Strength of a magnitude, which is given as a share of the strongest."""
    is_signed: bool = False
    """Whether half of the draws turn the strength around."""


def _affine(image: PilImage, matrix: tuple[float, ...], resample: Image.Resampling) -> PilImage:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=0)


OPERATIONS: dict[str, Operation] = {
    "Identity": Operation(lambda image, _, __: image),
    "ShearX": Operation(
        lambda image, strength, resample: _affine(image, (1, strength, 0, 0, 1, 0), resample),
        lambda share: 0.3 * share,
        is_signed=True,
    ),
    "ShearY": Operation(
        lambda image, strength, resample: _affine(image, (1, 0, 0, strength, 1, 0), resample),
        lambda share: 0.3 * share,
        is_signed=True,
    ),
    "TranslateX": Operation(
        lambda image, strength, resample: _affine(
            image, (1, 0, -int(strength * image.width), 0, 1, 0), resample
        ),
        lambda share: _SHIFT * share,
        is_signed=True,
    ),
    "TranslateY": Operation(
        lambda image, strength, resample: _affine(
            image, (1, 0, 0, 0, 1, -int(strength * image.height)), resample
        ),
        lambda share: _SHIFT * share,
        is_signed=True,
    ),
    "Rotate": Operation(
        lambda image, strength, resample: image.rotate(strength, resample, fillcolor=0),
        lambda share: 30.0 * share,
        is_signed=True,
    ),
    "Brightness": Operation(
        lambda image, strength, _: ImageEnhance.Brightness(image).enhance(1.0 + strength),
        lambda share: 0.9 * share,
        is_signed=True,
    ),
    "Color": Operation(
        lambda image, strength, _: ImageEnhance.Color(image).enhance(1.0 + strength),
        lambda share: 0.9 * share,
        is_signed=True,
    ),
    "Contrast": Operation(
        lambda image, strength, _: ImageEnhance.Contrast(image).enhance(1.0 + strength),
        lambda share: 0.9 * share,
        is_signed=True,
    ),
    "Sharpness": Operation(
        lambda image, strength, _: ImageEnhance.Sharpness(image).enhance(1.0 + strength),
        lambda share: 0.9 * share,
        is_signed=True,
    ),
    "Posterize": Operation(
        lambda image, strength, _: ImageOps.posterize(image, int(strength)),
        lambda share: 8 - round(4 * share),
    ),
    "Solarize": Operation(
        lambda image, strength, _: ImageOps.solarize(image, strength),  # type: ignore[arg-type]
        lambda share: 255.0 * (1.0 - share),
    ),
    "AutoContrast": Operation(lambda image, _, __: ImageOps.autocontrast(image)),
    "Equalize": Operation(lambda image, _, __: ImageOps.equalize(image)),
}
"""In the order that draws name them by: it never changes."""

_IN_ORDER = tuple(OPERATIONS.values())


def rand_augment(
    image: PilImage, *, number: int, magnitude: int, resample: Image.Resampling, rng: KeyedRng
) -> PilImage:
    """``number`` operations, one after another; one may come twice."""
    for turn in range(number):
        operation = _IN_ORDER[rng.randint(RngPurpose.RAND_AUGMENT, 2 * turn, len(_IN_ORDER))]
        strength = operation.strength(magnitude / STRONGEST)
        if operation.is_signed and rng.randint(RngPurpose.RAND_AUGMENT, 2 * turn + 1, 2):
            strength = -strength
        image = operation.apply(image, strength, resample)
    return image
