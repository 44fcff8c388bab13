"""How far apart saves lose the least time: what they cost against what a failure loses."""

import math

ELASTIC_MTBF_S = 86_400.0
"""Most time between losses on which an elastic run chooses its intervals. Assumed, once a day: its
nodes come and go for more reasons than the failures that were published (reclaims, other jobs)."""


def young_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """Interval between saves that loses the least time, to first order.

    Source: Young 1974, doi:10.1145/361147.361115.
    """
    return math.sqrt(2 * blocking_s * mtbf_s)


def daly_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """As ``young_interval_s``, of a higher order; training time, without the save itself.

    Args:
        blocking_s: For which training waits: of an asynchronous save, not the write behind it.

    Source: Daly 2006, doi:10.1016/j.future.2004.11.016.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocking_s / (2 * mtbf_s)
    young_s = young_interval_s(blocking_s=blocking_s, mtbf_s=mtbf_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking_s


def best_every(*, step_s: float, blocked_s: float, counts_s: float, mtbf_s: float) -> int:
    """Whole steps between two saves, or two snapshots, that lose the least time.

    Rounding the best time to whole steps stays the optimum to first order, also where step times
    vary (hal-02514107).

    Args:
        counts_s: From the copy until it counts: the next comes no earlier.
    """
    wanted_s = daly_interval_s(blocking_s=blocked_s, mtbf_s=mtbf_s)
    return max(1, math.ceil(counts_s / step_s), round(wanted_s / step_s))
