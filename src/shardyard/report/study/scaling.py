"""Efficiency of each size against the first, with its interval: measured and predicted.

Efficiency is the rate of an accelerator over that of an accelerator of the smallest size
that has one. It is called scaling only where no setting changed. Unmeasured sizes are
extrapolated between two laws, and at most to ``FARTHEST`` times the largest measured size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardyard.report.study.rows import Figure, Forecast, ScalingSeries, SeriesRow, changes

BAR = 0.05
"""A forecast that may be off by more than this, absolute, says which term is open."""

FARTHEST = 4.0
"""Sizes beyond so many times the largest measured one are not extrapolated."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row and what it is worth against the first one."""

    row: SeriesRow
    efficiency: Figure | None
    """Measured or published, 0 to 1; with its interval where one is known."""
    predicted: Figure | None
    """By the plan, against the plan of the same first size; low and high are its band."""
    extrapolated: Figure | None
    changed: tuple[str, ...]
    """Settings that differ from the first size."""
    is_first: bool = False

    @property
    def is_scaling(self) -> bool:
        """Whether its efficiency may be called one."""
        return not self.changed

    @property
    def error(self) -> float | None:
        """Predicted efficiency less the measured one."""
        if self.predicted is None or self.efficiency is None:
            return None
        return self.predicted.value - self.efficiency.value

    @property
    def rate_error(self) -> float | None:
        """Predicted over measured rate, less one."""
        forecast, rate = self.row.forecast, self.row.rate
        if forecast is None or rate is None:
            return None
        if rate.tokens_per_s is not None and forecast.tokens_per_s is not None:
            return forecast.tokens_per_s / rate.tokens_per_s - 1
        if rate.samples_per_s is not None:
            return forecast.samples_per_s / rate.samples_per_s - 1
        return None


def points(series: ScalingSeries) -> tuple[Point, ...]:
    """All rows of a series, the smallest first."""
    rows = sorted(series.rows, key=lambda row: row.accelerators)
    first = next((row for row in rows if row.rate is not None), None)
    planned = _first_forecast(rows, first)
    base = first or planned
    found = [
        Point(
            row=row,
            efficiency=_efficiency(row, first),
            predicted=_predicted(row, planned),
            extrapolated=None,
            changed=() if base is None else changes(row.settings, base.settings, series.hold),
            is_first=row is base,
        )
        for row in rows
    ]
    return tuple(_with_extrapolation(point, found) for point in found)


def _first_forecast(rows: Sequence[SeriesRow], first: SeriesRow | None) -> SeriesRow | None:
    """The size that forecasts are held against: the measured first one, where it has a plan."""
    if first is not None:
        return first if first.forecast is not None else None
    return next((row for row in rows if row.forecast is not None), None)


def _efficiency(row: SeriesRow, first: SeriesRow | None) -> Figure | None:
    if row.rate is None or first is None or first.rate is None:
        return None
    value = (row.rate.value / row.accelerators) / (first.rate.value / first.accelerators)
    if row is first:
        return Figure(value=1.0)
    ours, theirs = row.rate.spread, first.rate.spread
    if ours is None or theirs is None:
        return Figure(value=value)
    factor = ours.combined_with(theirs).factor
    return Figure(value=value, low=value / factor, high=value * factor)


def _predicted(row: SeriesRow, first: SeriesRow | None) -> Figure | None:
    if row.forecast is None or first is None or first.forecast is None:
        return None
    if row is first:
        return Figure(value=1.0)

    def against(step_s: Callable[[Forecast], float]) -> float:
        assert row.forecast is not None and first is not None and first.forecast is not None
        each = row.forecast.samples_per_step / step_s(row.forecast) / row.accelerators
        base = first.forecast.samples_per_step / step_s(first.forecast) / first.accelerators
        return each / base

    value = against(lambda each: each.step_s)
    ends = against(lambda each: each.worst_s), against(lambda each: each.best_s)
    return Figure(value=value, low=min(value, *ends), high=max(value, *ends))


def open_points(row: SeriesRow, first: SeriesRow) -> list[tuple[str, str, float]]:
    """Return how much efficiency each open term of a forecast would cost at its worst.

    Returns:
        Name, assumption, and the share of efficiency, largest first.
    """
    ours, theirs = row.forecast, first.forecast
    if ours is None or theirs is None:
        return []
    scale = ours.samples_per_step / row.accelerators
    scale /= theirs.samples_per_step / first.accelerators
    usual = scale * theirs.step_s / ours.step_s
    worst_of = {term.name: term.step_s for term in theirs.open_terms}
    found = [
        (term.name, term.assumed,
         usual - scale * worst_of.get(term.name, theirs.step_s) / term.step_s)
        for term in ours.open_terms
    ]  # fmt: skip
    return sorted(found, key=lambda each: -each[2])


# --- sizes that nobody measured -----------------------------------------------------------------


def _with_extrapolation(point: Point, all_points: Sequence[Point]) -> Point:
    if point.row.origin not in ("extrapolated", "not run"):
        return point
    figure = _extrapolated(point.row, all_points)
    return Point(
        row=point.row, efficiency=None, predicted=point.predicted, extrapolated=figure,
        changed=point.changed, is_first=False,
    )  # fmt: skip


def _extrapolated(row: SeriesRow, all_points: Sequence[Point]) -> Figure | None:
    """Between two laws through the first size and the last one that scales.

    A step for the same work per device grows either with each doubling (what waits for the slowest
    does) or with each accelerator (what is done one after the other does). What is measured is
    nearly always between the two. Both pass through the measured point, over its interval.
    """
    known = [each for each in all_points if each.efficiency is not None and each.is_scaling]
    if len(known) < 2:
        return None
    first, last = known[0].row.accelerators, known[-1].row.accelerators
    if not first < row.accelerators <= FARTHEST * last:
        return None
    figure = known[-1].efficiency
    assert figure is not None
    ends = [figure.value, figure.low or figure.value, figure.high or figure.value]
    doublings = math.log2(row.accelerators / first) / math.log2(last / first)
    devices = (row.accelerators - first) / (last - first)
    found = [
        1 / max(0.05, 1 + (1 / end - 1) * share) for end in ends for share in (doublings, devices)
    ]
    middle = [1 / max(0.05, 1 + (1 / figure.value - 1) * share) for share in (doublings, devices)]
    return Figure(value=sum(middle) / 2, low=min(found), high=max(found))


# --- in words -----------------------------------------------------------------------------------


def series_notes(series: ScalingSeries) -> list[str]:
    """Return the remarks next to a series' table: failures, changes, open terms."""
    return [text for _, text in _notes(series)]


def series_words(series: ScalingSeries) -> str:
    """Return the same remarks as one paragraph, with what is alike for all sizes only once."""
    said = [text for is_open, text in _notes(series) if not is_open][1:]  # without the kind
    found = [point for point in points(series) if _is_open(point)]
    first = next((point for point in points(series) if point.is_first), None)
    if not found or first is None:
        return " ".join(said)
    bands = "; ".join(f"{_where(point.row)} {_band(point)}" for point in found)
    said.append(f"Predicted efficiency, and what its open terms leave: {bands}.")
    lacks = _unknown_costs(found[-1], first.row)
    if lacks:
        at = _where(found[-1].row)
        said.append(f"What a plan cannot know, each by itself at its worst, on {at}: {lacks}.")
    return " ".join([*said, _NO_DATA_WAIT])


def _notes(series: ScalingSeries) -> Iterator[tuple[bool, str]]:
    """Yield each remark, with whether it is about open terms of a forecast."""
    found = points(series)
    yield False, f"{series.name}: {series.kind}."
    first = next((point for point in found if point.is_first), None)
    if first is not None and first.row.forecast is None and any(p.row.forecast for p in found):
        yield (
            False,
            (
                f"No efficiency is predicted: {first.row.accelerators} accelerators, which the "
                "others are held against, have no plan. Ask for that size too."
            ),
        )
    changed: dict[str, list[str]] = {}
    for point in found:
        row, where = point.row, _where(point.row)
        if row.origin == "failed":
            yield False, f"{where} failed: {row.note} No line is drawn through it."
        elif row.origin == "not run" and row.note:
            yield False, f"{where} was not run: {row.note}"
        if row.tight and row.origin == "predicted":
            yield False, f"{where}: memory is tight: {row.tight}."
        if point.changed:
            changed.setdefault(", ".join(point.changed), []).append(where)
        if first is not None and not point.is_first and _is_open(point):
            yield True, _open_words(point, first.row, where)
    for what, places in changed.items():
        verdict = "not called scaling, as settings changed against the first size"
        yield False, f"{', '.join(places)}: {what}. The efficiency is {verdict}."


def _where(row: SeriesRow) -> str:
    return f"{row.nodes} node{'' if row.nodes == 1 else 's'}"


def _is_open(point: Point) -> bool:
    """Whether a forecast has a wide band, or is far off."""
    figure, error = point.predicted, point.error
    if point.is_first or figure is None or figure.low is None or figure.high is None:
        return False
    is_wide = max(figure.high - figure.value, figure.value - figure.low) > BAR
    return is_wide or (error is not None and abs(error) > BAR)


def _band(point: Point) -> str:
    """The forecast with its band, and what was measured."""
    figure, error = point.predicted, point.error
    assert figure is not None and figure.low is not None and figure.high is not None
    text = f"{_percent(figure.value)} ({_percent(figure.low)} to {_percent(figure.high)})"
    if error is None or point.efficiency is None:
        return text
    outside = "" if figure.low <= point.efficiency.value <= figure.high else ", outside of the band"
    return f"{text}, measured {_percent(point.efficiency.value)}{outside}"


def _unknown_costs(point: Point, first: SeriesRow) -> str:
    return "; ".join(
        f"{name} ({assumed}): {100 * share:.1f} points"
        for name, assumed, share in open_points(point.row, first)
    )


_NO_DATA_WAIT = "The wait for data is not planned for text."


def _open_words(point: Point, first: SeriesRow, where: str) -> str:
    """Describe the missing term and the band that it leaves."""
    figure, error = point.predicted, point.error
    assert figure is not None and figure.low is not None and figure.high is not None
    band = f"{_percent(figure.low)} to {_percent(figure.high)}"
    lacks = _unknown_costs(point, first)
    text = f"{where}: predicted {_percent(figure.value)}, and what is open leaves {band}"
    if error is not None and point.efficiency is not None:
        inside = figure.low <= point.efficiency.value <= figure.high
        text += (
            f"; it was {_percent(point.efficiency.value)}, off by {100 * error:+.1f} points"
            f"{'' if inside else ' and outside of the band'}"
        )
    why = f"What a plan cannot know, each by itself at its worst: {lacks}. " if lacks else ""
    return f"{text}. {why}{_NO_DATA_WAIT}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
