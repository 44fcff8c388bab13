"""Time to quality is not rate alone: a larger batch needs more samples for the same loss.

Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.3: with a critical batch B_c, steps and
samples to a loss follow (S / S_min - 1) (E / E_min - 1) = 1, so that a batch B needs 1 + B / B_c
times the fewest samples.
"""

import math

from shardyard.errors import RequestError


def samples_factor(global_batch: float, *, critical_batch: float) -> float:
    """Samples to a given loss at this batch, over the fewest that any batch needs."""
    if not 0 < critical_batch < math.inf:
        raise RequestError(
            f"critical batch={critical_batch} is no number of samples. It is the batch at which "
            "twice the fewest samples are needed. Give one above 0, or leave it out."
        )
    return 1 + global_batch / critical_batch
