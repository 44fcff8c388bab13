"""From a picture to a sample: in order, keyed by the sample, and torchvision's middle crop."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from shardyard.data.images.transforms import INTERPOLATIONS, Augmentation, CenterCrop
from tests.data.images.pictures import picture

PLAIN = Augmentation(
    seed=0,
    size=16,
    resample=Image.Resampling.BILINEAR,
    area=(0.08, 1.0),
    ratio=(0.75, 4 / 3),
    flip=0.5,
    operations=0,
    magnitude=9,
    erase=0.0,
    erased_to=(124, 116, 104),
)


def test_every_thread_and_every_order_of_asking_gives_the_same_pixels() -> None:
    view = replace(PLAIN, operations=2, erase=0.5)
    image = picture(40, 30)
    forwards = [view(image, epoch=1, sample=sample) for sample in range(24)]
    with ThreadPoolExecutor(4) as threads:
        again = threads.map(lambda n: view(image, epoch=1, sample=n), reversed(range(24)))
    assert all(np.array_equal(a, b) for a, b in zip(reversed(forwards), again, strict=True))
    assert len({pixels.tobytes() for pixels in forwards}) == 24
    assert forwards[0].shape == (16, 16, 3) and forwards[0].dtype == np.uint8


def test_a_picture_is_another_one_in_every_epoch() -> None:
    seen = {PLAIN(picture(40, 30), epoch=epoch, sample=5).tobytes() for epoch in range(6)}
    assert len(seen) == 6


@pytest.mark.parametrize(("flip", "least", "most"), [(0.0, 0, 0), (0.25, 70, 130), (1.0, 1, 1)])
def test_as_many_pictures_are_mirrored_as_asked(flip: float, least: int, most: int) -> None:
    whole = replace(PLAIN, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=flip, size=4)
    number = 1 if flip == 1.0 else 400
    straight = np.asarray(picture(4, 4))
    mirrored = 0
    for sample in range(number):
        pixels = whole(picture(4, 4), epoch=0, sample=sample)
        assert np.array_equal(pixels, straight) or np.array_equal(pixels, straight[:, ::-1])
        mirrored += not np.array_equal(pixels, straight)
    assert least <= mirrored <= most


def test_what_is_erased_has_its_colour_and_the_rest_stays() -> None:
    whole = replace(PLAIN, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, erase=1.0)
    before = np.asarray(picture(16, 16))
    after = whole(picture(16, 16), epoch=0, sample=0)
    is_erased = (after == (124, 116, 104)).all(axis=-1)
    assert 0.02 < is_erased.mean() < 0.36
    assert np.array_equal(after[~is_erased], before[~is_erased])


@pytest.mark.parametrize(
    ("shape", "size", "share", "how", "pixels"),
    [
        ((50, 37), 24, 0.875, "bilinear", "02ccb83207cbddf6"),
        ((50, 37), 24, 0.875, "bicubic", "4958bfd5b593c7a4"),
        ((37, 50), 24, 1.0, "bilinear", "7aa24b89133a0d6e"),
        ((8, 8), 32, 0.875, "bicubic", "7cfee825df1be08d"),
        ((31, 200), 16, 0.8, "bilinear", "014e591c176d6111"),
    ],
)
def test_the_middle_crop_is_that_of_torchvision(
    shape: tuple[int, int], size: int, share: float, how: str, pixels: str
) -> None:
    """Compose([Resize(round(size / share), how), CenterCrop(size)]) of torchvision 0.29.2."""
    view = CenterCrop(size=size, share=share, resample=INTERPOLATIONS[how])
    after = view(picture(*shape), epoch=3, sample=1)
    assert hashlib.sha256(after.tobytes()).hexdigest()[:16] == pixels
