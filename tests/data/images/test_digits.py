"""The digits that come with the package: the file as it was published, and a fixed fifth."""

import hashlib
import io

import numpy as np
from PIL import Image

from shardyard.data.images.digits import COUNT, DIGITS_FILE, HELD_OUT, png, read_digits


def test_the_file_is_the_one_whose_source_is_named() -> None:
    content = DIGITS_FILE.read_bytes()
    assert len(content) < 100_000
    assert hashlib.sha256(content).hexdigest() == (
        "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
    )


def test_there_are_1797_digits_and_the_same_fifth_is_held_out_each_time() -> None:
    digits = list(read_digits())
    assert len(digits) == COUNT
    # as scikit-learn's page on the data set counts them
    classes = np.bincount([digit.label for digit in digits])
    assert classes.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    held_out = [number for number, digit in enumerate(digits) if digit.is_validation]
    assert len(held_out) == HELD_OUT == COUNT // 5
    assert held_out[:4] == [10, 11, 13, 15]
    assert {int(digit.pixels.max()) for digit in digits} <= {*range(200, 256)}


def test_a_png_holds_the_pixels_that_it_was_made_of() -> None:
    pixels = np.arange(15, dtype=np.uint8).reshape(3, 5) * 17
    picture = Image.open(io.BytesIO(png(pixels)))
    picture.verify()  # checksums
    picture = Image.open(io.BytesIO(png(pixels)))
    assert picture.mode == "L" and np.array_equal(np.asarray(picture), pixels)
