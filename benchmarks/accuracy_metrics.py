"""How far predictions are from measurements: pure arithmetic on pairs, ranks and counts.

A *ratio* is predicted / measured. Where there is nothing to compare, a measure is None.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_GROUP = 3
"""Layouts that a group needs before an order among them means something."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One measured number and its prediction, in the same unit."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.predicted / self.measured


@dataclass(frozen=True, kw_only=True)
class Share:
    """``hits`` of ``total``."""

    hits: int
    total: int

    @property
    def value(self) -> float | None:
        """Fraction; None without a total."""
        return self.hits / self.total if self.total else None

    def interval(self) -> tuple[float, float] | None:
        """Wilson score interval at 95 %.

        Source: Wilson 1927, J. Am. Stat. Assoc. 22, pp. 209-212.
        """
        if not self.total:
            return None
        z, n, p = 1.959964, self.total, self.hits / self.total
        center = p + z * z / (2 * n)
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def mape(ratios: Sequence[float]) -> float | None:
    """Mean absolute error, relative to the measurement."""
    return statistics.fmean(abs(ratio - 1) for ratio in ratios) if ratios else None


def bias(ratios: Sequence[float]) -> float | None:
    """Mean signed error, relative to the measurement; above 0: predicted too fast or too much."""
    return statistics.fmean(ratio - 1 for ratio in ratios) if ratios else None


def p90(ratios: Sequence[float]) -> float | None:
    """Absolute error that nine rows in ten stay within, linear between two rows."""
    if not ratios:
        return None
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    place = 0.9 * (len(errors) - 1)
    below = math.floor(place)
    above = min(below + 1, len(errors) - 1)
    return errors[below] + (place - below) * (errors[above] - errors[below])


def best_scalar(ratios: Sequence[float]) -> float:
    """The factor on all predictions that makes their MAPE least.

    The sum of |s r - 1| = r |s - 1/r| is least at the median of 1/r, each weighing r.
    """
    half = sum(ratios) / 2
    passed = 0.0
    for ratio in sorted(ratios, reverse=True):
        passed += ratio
        if passed >= half:
            return 1 / ratio
    raise ValueError("a scalar needs at least one ratio above zero")


def mape_scaled(ratios: Sequence[float]) -> float | None:
    """MAPE after the best scalar; None below two rows, where it would be zero by construction."""
    if len(ratios) < 2:
        return None
    scalar = best_scalar(ratios)
    return mape([scalar * ratio for ratio in ratios])


def geometric_mean(values: Sequence[float]) -> float:
    """The mean in which twice too fast and twice too slow cancel."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def spearman(group: Sequence[Pair]) -> float | None:
    """Correlation of the two orders; equal numbers share a rank.

    None if all measured numbers are equal: there is no order to find. 0 if all predictions are
    equal: an order exists and none was found.
    """
    measured = _ranks([pair.measured for pair in group])
    predicted = _ranks([pair.predicted for pair in group])
    if len(set(measured)) < 2:
        return None
    if len(set(predicted)) < 2:
        return 0.0
    return statistics.correlation(predicted, measured)


def regret(group: Sequence[Pair]) -> float:
    """How much slower the layout predicted fastest was than the one measured fastest.

    Args:
        group: Rates, higher is better. Layouts predicted equally fast count with their mean.

    Returns:
        Time of the picked layout / time of the best - 1.
    """
    best = max(pair.measured for pair in group)
    top = max(pair.predicted for pair in group)
    picked = [pair.measured for pair in group if pair.predicted == top]
    return statistics.fmean(best / rate - 1 for rate in picked)


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Mean of those that exist."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def leave_one_source_out(ratios: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """One factor learnt from all other sources, applied to the one left out.

    The factor is the geometric mean over the other sources of 1 / their median ratio, so that a
    source with many rows has no more say than one with few. It answers: is what a source
    lacks a common factor, or its own?

    Args:
        ratios: Source -> predicted / measured of its rows.

    Returns:
        Source -> ``scalar`` of the others and ``mape`` of its rows under it; empty for one source.
    """
    medians = {source: statistics.median(rows) for source, rows in ratios.items() if rows}
    answer = {}
    for source in medians:
        others = [1 / median for other, median in medians.items() if other != source]
        if others:
            scalar = geometric_mean(others)
            error = mape([scalar * ratio for ratio in ratios[source]])
            answer[source] = {"scalar": scalar, "mape": error or 0.0}
    return answer


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2 + 1
        start = end + 1
    return ranks
