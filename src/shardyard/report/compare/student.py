"""Quantiles of Student's t, which Python's library lacks and a report needs no SciPy for."""

import math
from functools import cache

_STEPS = 400
"""Of Simpson's rule: the quantile is then right to 1e-6."""


@cache
def student(degrees: int, confidence: float) -> float:
    """Half the width, in standard errors, of an interval that holds the mean so often.

    Args:
        degrees: Of freedom, from 1.
        confidence: Between 0 and 1, both sides together: 0.95.
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Probability of a value between -t and t.

    With t = sqrt(degrees) tan(a) the density becomes a power of the cosine, which is smooth and
    has a finite end.
    """
    end = math.atan(t / math.sqrt(degrees))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    width = end / _STEPS
    total = sum(
        (1 if k in (0, _STEPS) else 4 if k % 2 else 2) * math.cos(k * width) ** (degrees - 1)
        for k in range(_STEPS + 1)
    )
    return 2 * scale / math.sqrt(math.pi) * total * width / 3
