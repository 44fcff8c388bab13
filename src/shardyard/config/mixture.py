"""How samples are dealt to the sources of a mixture: in whole numbers, a cycle at a time."""

import math
from collections.abc import Sequence

SLOTS = 1000
"""Samples in a cycle: shares are exact to a thousandth in each of them."""


def slots_of(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a cycle, by largest remainder: their sum is ``SLOTS``.

    Of equal remainders the source named first gets the sample.
    """
    total = math.fsum(weights)
    exact = [weight / total * SLOTS for weight in weights]
    slots = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: slots[place] - exact[place])
    for place in by_remainder[: SLOTS - sum(slots)]:
        slots[place] += 1
    return slots
