"""RandAugment's operations written out pixel by pixel, from their definitions and without Pillow.

Levels are floats: a library may round each to one of its neighbours.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float64]
"""(rows, columns, 3)."""


def sampled(levels: Levels, source: Callable[[float, float], tuple[float, float]]) -> Levels:
    """Each pixel from a place in the picture, bilinear between centres; black outside of it."""
    height, width, _ = levels.shape
    result = np.zeros_like(levels)
    for row in range(height):
        for column in range(width):
            x, y = source(column + 0.5, row + 0.5)
            if not (0 <= x < width and 0 <= y < height):
                continue
            left, top = math.floor(x - 0.5), math.floor(y - 0.5)
            right, below = x - 0.5 - left, y - 0.5 - top
            columns = [min(max(each, 0), width - 1) for each in (left, left + 1)]
            rows = [min(max(each, 0), height - 1) for each in (top, top + 1)]
            for i, down in zip(rows, (1 - below, below), strict=True):
                for j, across in zip(columns, (1 - right, right), strict=True):
                    result[row, column] += down * across * levels[i, j]
    return result


def rotated(levels: Levels, degrees: float) -> Levels:
    """Against the clock, around the middle."""
    height, width, _ = levels.shape
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

    def source(x: float, y: float) -> tuple[float, float]:
        x, y = x - width / 2, y - height / 2
        return cosine * x - sine * y + width / 2, sine * x + cosine * y + height / 2

    return sampled(levels, source)


def blended(other: Levels | float, levels: Levels, factor: float) -> Levels:
    """``factor`` 0: the other; 1: the picture; beyond 1: away from the other."""
    return np.clip(other + factor * (levels - other), 0, 255)


def grey(levels: Levels) -> Levels:
    """ITU-R 601-2 luma, in whole levels."""
    return np.floor(levels @ [0.299, 0.587, 0.114] + 0.5)[..., None]


def smooth(levels: Levels) -> Levels:
    """Each pixel with its eight neighbours, itself five times; the border stays."""
    result, (height, width, _) = levels.copy(), levels.shape
    inside = levels[1:-1, 1:-1] * 4
    for row in range(3):
        for column in range(3):
            inside = inside + levels[row : height - 2 + row, column : width - 2 + column]
    result[1:-1, 1:-1] = np.floor(inside / 13 + 0.5)
    return result


def stretched(levels: Levels) -> Levels:
    """Each colour from black to white."""
    low, high = levels.min(axis=(0, 1)), levels.max(axis=(0, 1))
    result: Levels = (levels - low) * 255 / (high - low)
    return result


def equalized(levels: Levels) -> Levels:
    """Each colour so that all levels are as frequent; the last one stands for its step."""
    result = np.empty_like(levels)
    for colour in range(3):
        values = levels[..., colour].astype(int)
        counts = np.bincount(values.ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        below = np.concatenate([[0], np.cumsum(counts)[:-1]])
        table = np.clip((step // 2 + below) // step, 0, 255) if step else np.arange(256)
        result[..., colour] = table[values]
    return result


WRITTEN_OUT: dict[str, Callable[[Levels, float], Levels]] = {
    "Identity": lambda levels, _: levels,
    "ShearX": lambda levels, s: sampled(levels, lambda x, y: (x + s * y, y)),
    "ShearY": lambda levels, s: sampled(levels, lambda x, y: (x, y + s * x)),
    "TranslateX": lambda levels, s: sampled(levels, lambda x, y: (x - int(s * levels.shape[1]), y)),
    "TranslateY": lambda levels, s: sampled(levels, lambda x, y: (x, y - int(s * levels.shape[0]))),
    "Rotate": rotated,
    "Brightness": lambda levels, s: blended(0.0, levels, 1 + s),
    "Color": lambda levels, s: blended(grey(levels), levels, 1 + s),
    "Contrast": lambda levels, s: blended(math.floor(grey(levels).mean() + 0.5), levels, 1 + s),
    "Sharpness": lambda levels, s: blended(smooth(levels), levels, 1 + s),
    "Posterize": lambda levels, bits: levels // 2 ** (8 - bits) * 2 ** (8 - bits),
    "Solarize": lambda levels, threshold: np.where(levels < threshold, levels, 255 - levels),
    "AutoContrast": lambda levels, _: stretched(levels),
    "Equalize": lambda levels, _: equalized(levels),
}
"""Picture and strength -> picture."""
