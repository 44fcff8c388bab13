"""The documents that the files of this folder hold."""

import random

END = 0
"""Id that ends a text in the tests' tokenizer."""


def documents() -> list[list[int]]:
    """Forty documents of 1 to 90 ids from 1 to 299."""
    draw = random.Random(0)
    return [[draw.randrange(1, 300) for _ in range(draw.randrange(1, 91))] for _ in range(40)]
