"""RandAugment: torchvision's pixels at the same strength, and each operation as often."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from shardyard.data.images.rand_augment import OPERATIONS, STRONGEST, Operation, rand_augment
from shardyard.data.order import KeyedRng
from tests.data.images.pictures import picture
from tests.data.images.written_out import WRITTEN_OUT

BILINEAR = Image.Resampling.BILINEAR
# of torchvision 0.29.2: autoaugment._apply_op(picture(24, 16), name, strength, BILINEAR, fill=None)
OF_TORCHVISION = [
    ("Identity", 0.0, "5ea356ff30041986"),
    ("ShearX", 0.07, "aded82803c2819b1"),
    ("ShearY", -0.13, "a028017520eb0ef6"),
    ("TranslateX", 5.4 / 24, "3d50cd029caf21ae"),
    ("TranslateY", -3.7 / 16, "c594eaf6c3610b9a"),
    ("Rotate", -17.0, "890db6d52cc3df94"),
    ("Brightness", 0.27, "39282f03770f8143"),
    ("Color", -0.45, "1c3bb89bf51f4c47"),
    ("Contrast", 0.36, "36a0aded10979e38"),
    ("Sharpness", -0.63, "356de6ed4b3ece59"),
    ("Posterize", 5, "6432968e52e22a12"),
    ("Solarize", 178.5, "fd184aec98036d13"),
    ("AutoContrast", 0.0, "d62f7a43812d7bab"),
    ("Equalize", 0.0, "8a154efb7f9fd21e"),
]
# its RandAugment's _augmentation_space(31, (224, 224)) at magnitude 9
STRENGTHS_AT_9 = {
    "ShearX": 0.09, "ShearY": 0.09, "TranslateX": 30.453173, "TranslateY": 30.453173,
    "Rotate": 9.0, "Brightness": 0.27, "Color": 0.27, "Contrast": 0.27, "Sharpness": 0.27,
    "Posterize": 7.0, "Solarize": 178.5,
}  # fmt: skip


@pytest.mark.parametrize(("name", "strength", "pixels"), OF_TORCHVISION)
def test_an_operation_gives_the_pixels_of_torchvision(
    name: str, strength: float, pixels: str
) -> None:
    after = OPERATIONS[name].apply(picture(24, 16), strength, BILINEAR)
    assert hashlib.sha256(after.tobytes()).hexdigest()[:16] == pixels


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_its_definition_says(name: str) -> None:
    before, operation = picture(23, 18), OPERATIONS[name]
    for magnitude in (1, 17, STRONGEST):
        strength = operation.strength(magnitude / STRONGEST)
        for signed in {strength, -strength if operation.is_signed else strength}:
            after = np.asarray(operation.apply(before, signed, BILINEAR)).astype(float)
            expected = WRITTEN_OUT[name](np.asarray(before).astype(float), signed)
            assert np.abs(after - expected).max() <= 1.0, (magnitude, signed)


def test_there_are_the_14_operations_of_the_paper_with_their_strengths() -> None:
    assert list(OPERATIONS) == [name for name, _, _ in OF_TORCHVISION]
    for name, operation in OPERATIONS.items():
        ours = operation.strength(9 / STRONGEST) * (224 if "Translate" in name else 1)
        assert ours == pytest.approx(STRENGTHS_AT_9.get(name, 0.0), rel=1e-6)


def test_each_operation_and_each_sign_comes_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[int, float]] = Counter()

    def counting(place: int) -> Operation:
        def apply(image: Image.Image, strength: float, _: Image.Resampling) -> Image.Image:
            seen[place, strength] += 1
            return image

        return Operation(apply, lambda share: share, is_signed=place < 7)

    rows = tuple(counting(place) for place in range(14))
    monkeypatch.setattr("shardyard.data.images.rand_augment._IN_ORDER", rows)
    image = picture(2, 2)
    for sample in range(1400):
        draws = KeyedRng(0, 0, sample)
        rand_augment(image, number=2, magnitude=15, resample=BILINEAR, rng=draws)
    assert seen.total() == 2800
    expected = {(place, sign * 0.5): 100 for place in range(7) for sign in (1, -1)}
    expected |= {(place, 0.5): 200 for place in range(7, 14)}
    assert seen.keys() == expected.keys()
    # chi-square of 21 cells: above 46.8 once in 1,000 times
    assert sum((seen[cell] - mean) ** 2 / mean for cell, mean in expected.items()) < 46.8


def test_no_operation_leaves_the_picture_as_it_is() -> None:
    before = picture(12, 9)
    after = rand_augment(before, number=0, magnitude=9, resample=BILINEAR, rng=KeyedRng(0, 0, 0))
    assert np.array_equal(np.asarray(before), np.asarray(after))
