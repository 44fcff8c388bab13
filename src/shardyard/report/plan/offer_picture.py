"""Offers by time and price, both logarithmic, with labels that keep out of each other's way."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from shardyard.planner.offers import Offer, Offers
from shardyard.report.plots import BLUE, GREY, INK, MUTED, ORANGE, draw
from shardyard.units import format_count, format_seconds

_SIZE_INCHES = (5.0, 3.7)
_TIMES_S = (1, 10, 60, 600, 3600, 10_800, 36_000, 86_400, 259_200, 864_000, 2_592_000, 8_640_000,
            31_536_000, 94_608_000, 315_360_000)  # fmt: skip
"""Where a logarithmic axis of time has ticks: 1 s to 10 years, round in their unit."""
_MOST_TICKS = 7
_NEAR_PT, _FAR_PT = 5.0, 44.0
"""Between a point and its label."""
_AIR_PIXELS = 2.0
"""Around a label; pages use narrower fonts than the one that is measured here."""

Point = tuple[float, float, str]
"""Seconds, dollars, name."""


def draw_offers(offers: Offers) -> str:
    """The Pareto front as SVG: each point an offer, the picked one in another colour."""
    return draw("plan-offers", lambda axes: _paint(axes, offers), size_inches=_SIZE_INCHES)


def _paint(axes: Axes, offers: Offers) -> None:
    front, picked = offers.offers, offers.picked
    times, prices = [o.wall_s for o in front], [o.usd for o in front]
    axes.set_xscale("log")
    axes.set_yscale("log")
    # the lowest price at which each time can be had: offers above the line are dominated
    axes.step(times, prices, where="pre", color=GREY, linewidth=0.9, alpha=0.7)
    axes.scatter(times, prices, s=20, color=BLUE, zorder=3)
    if picked is not None:
        axes.scatter([picked.wall_s], [picked.usd], s=46, color=ORANGE, zorder=4)
    _limit(axes, times, prices)
    axes.grid(visible=True, axis="both")
    axes.set_title("Price of the run against its time")
    axes.set_xlabel("time, with start, saves and failures")
    axes.set_ylabel("price on demand")
    points = sorted({(o.wall_s, o.usd, o.name) for o in (*front, *_one(picked))})
    _label(axes, points, corners=list(zip(times, prices, strict=True)))


def _one(offer: Offer | None) -> Iterator[Offer]:
    if offer is not None:
        yield offer


def _limit(axes: Axes, times: Sequence[float], prices: Sequence[float]) -> None:
    """Room around the points, and round ticks."""
    left, right = _around(times)
    bottom, top = _around(prices)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.xaxis.set_major_locator(FixedLocator(_thinned(_time_ticks(left, right))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: format_seconds(s)))
    axes.yaxis.set_major_locator(FixedLocator(_thinned(_round_ticks(bottom, top))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda usd, _: f"${format_count(usd)}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _around(values: Sequence[float]) -> tuple[float, float]:
    """A range around values, on a logarithmic axis: a tenth of it on both sides."""
    low, high = min(values), max(values)
    margin = max(1.25, (high / low) ** 0.12)
    return low / margin, high * margin


def _time_ticks(low: float, high: float) -> list[float]:
    ticks = [float(tick) for tick in _TIMES_S if low <= tick <= high]
    if len(ticks) >= 3:
        return ticks
    unit = next((u for u in (86_400, 3600, 60) if high >= 2 * u), 1)
    return [tick * unit for tick in _round_ticks(low / unit, high / unit)]


def _round_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers; tenths where those are too few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(n / 10 for n in range(10, 100))):
        ticks = [factor * 10**exponent for exponent in exponents for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    return ticks


def _thinned(ticks: Sequence[float]) -> Sequence[float]:
    return ticks[:: -(-len(ticks) // _MOST_TICKS) or 1]


def _label(axes: Axes, points: Sequence[Point], corners: Sequence[tuple[float, float]]) -> None:
    """Name each point at the first place that is free; one without a free place has no label."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # the axes were just drawn into it
    figure.draw_without_rendering()  # settles the layout, which places are measured in
    figure.set_layout_engine("none")
    inside = axes.get_window_extent()
    room = Bbox.from_extents(inside.x0 + 6, inside.y0 + 2, figure.bbox.x1 - 2, inside.y1)
    taken = _drawn(axes, points, corners)
    names: list[Bbox] = []
    for time_s, usd, name in points:
        for offset in _places():
            text = _annotate(axes, name, (time_s, usd), offset)
            box = text.get_window_extent().padded(_AIR_PIXELS)
            lead = _lead(axes, (time_s, usd), offset, scale=figure.dpi / 72)
            is_free = not any(box.overlaps(other) for other in taken)
            if is_free and _holds(room, box) and not _meet(lead, names):
                taken += [box, *lead]
                names.append(box)
                if lead:
                    _draw_lead(axes, (time_s, usd), offset)
                break
            text.remove()


def _drawn(
    axes: Axes, points: Sequence[Point], corners: Sequence[tuple[float, float]]
) -> list[Bbox]:
    """Boxes of what labels must leave free: the points, and the line's two ways from each."""
    boxes = []
    for time_s, usd, _ in points:
        x, y = axes.transData.transform((time_s, usd))
        boxes.append(Bbox.from_bounds(x - 4, y - 4, 8, 8))
    ends = [axes.transData.transform(corner) for corner in corners]
    for (x0, y0), (x1, y1) in pairwise(ends):
        boxes.append(Bbox.from_extents(x0 - 1, min(y0, y1), x0 + 1, max(y0, y1)))
        boxes.append(Bbox.from_extents(min(x0, x1), y1 - 1, max(x0, x1), y1 + 1))
    return boxes


def _holds(outer: Bbox, inner: Bbox) -> bool:
    return bool(
        outer.x0 <= inner.x0
        and inner.x1 <= outer.x1
        and outer.y0 <= inner.y0
        and inner.y1 <= outer.y1
    )


def _places() -> Iterator[tuple[float, float]]:
    """Offsets in points, nearest first: the front falls to the right, so above it there is room."""
    for far in (_NEAR_PT, 12.0, 20.0, 30.0, _FAR_PT):
        for dx, dy in ((1, 0.6), (1, 0), (0.6, 1), (-1, -0.6), (-1, 0), (1, -0.6), (-0.6, -1)):
            yield far * dx, far * dy


def _annotate(
    axes: Axes, name: str, point: tuple[float, float], offset: tuple[float, float]
) -> Annotation:
    return axes.annotate(
        name, point, xytext=offset, textcoords="offset points", color=INK, fontsize=7.5,
        ha="left" if offset[0] > 0 else "right", va="center",
    )  # fmt: skip


def _lead(
    axes: Axes, point: tuple[float, float], offset: tuple[float, float], *, scale: float
) -> list[Bbox]:
    """Small boxes along the line from a point to a label away from it; none to a near one."""
    if math.hypot(*offset) <= 2 * _NEAR_PT:
        return []
    x, y = axes.transData.transform(point)
    dx, dy = offset[0] * scale, offset[1] * scale
    return [
        Bbox.from_bounds(x + dx * part / 8 - 1, y + dy * part / 8 - 1, 2, 2) for part in range(2, 8)
    ]


def _meet(lead: Sequence[Bbox], names: Sequence[Bbox]) -> bool:
    return any(box.overlaps(name) for box in lead for name in names)


def _draw_lead(axes: Axes, point: tuple[float, float], offset: tuple[float, float]) -> None:
    axes.annotate(
        "", point, xytext=offset, textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 2.5},
    )  # fmt: skip
