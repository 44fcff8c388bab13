"""The handwritten digits that come with the package: ``data.source: digits``.

1,797 pictures of 8 x 8 pixels, each a digit that one of 13 people wrote, in 17 levels of ink:
optdigits.tes of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository 1998, doi:10.24432/C50P49, licensed CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/). ``digits.csv.gz`` is the copy that scikit-learn 1.9
carries, unchanged, SHA-256 09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22: a
line for each picture, its 64 pixels row by row, then the digit.

A fifth is held out, always the same, chosen by a permutation of the lines: neighbouring lines are
of one person, and of digits in turn.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.data.order import permute

DIGITS_FILE = Path(__file__).with_name("digits.csv.gz")
COUNT, HELD_OUT = 1797, 359
SIDE, INK = 8, 16
"""Pixels of a side, and the largest number of a pixel."""


class Digit(NamedTuple):
    """One picture."""

    pixels: npt.NDArray[np.uint8]
    """(8, 8), from 0 to 255: ink is bright."""
    label: int
    is_validation: bool


def read_digits() -> Iterator[Digit]:
    """All pictures, in the order of the file."""
    with gzip.open(DIGITS_FILE, "rt", encoding="ascii") as lines:
        for number, line in enumerate(lines):
            *ink, label = map(int, line.split(","))
            pixels = np.round(np.array(ink).reshape(SIDE, SIDE) * (255 / INK)).astype(np.uint8)
            yield Digit(pixels, label, permute(number, COUNT, key=0) < HELD_OUT)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Grey pixels (rows, columns) as a PNG file, not compressed: the same bytes everywhere."""
    rows, columns = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: no filter
    head = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)  # 8 bits, grey
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines, level=0)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
