"""Pictures of a plan: memory and step time as stacked bars, each with its legend."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from shardyard.io.sanitize import sanitize
from shardyard.planner.instance_search import ClusterQuote, ClusterQuotes
from shardyard.planner.layouts import Search
from shardyard.planner.memory import MemoryEstimate
from shardyard.planner.plan import Plan
from shardyard.report.charts import (
    BLUE,
    GREY,
    INK,
    LINE,
    MUTED,
    ORANGE,
    RED,
    colour,
    draw,
    seconds_tick,
)
from shardyard.report.document import Chart, Panels, Text
from shardyard.report.plan.bars import (
    LOST_COLOURS,
    MEMORY_COLOURS,
    OWN_COLOURS,
    TIME_COLOURS,
    Bar,
    memory_bars,
    time_bars,
)
from shardyard.units import format_bytes, format_count, format_seconds

_WIDTH = 4.4
"""Width in inches: 8-point text is then as large as the page's.

It fits next to another figure or on a phone.
"""
_LINE_PT = 11.0
_BAR_PT = 17.0
_GAP_PT = 9.0
_AROUND_PT = 46.0
"""Title and axis."""
_LABEL_CHARACTERS = 62
"""Most characters of 8 points that fit the width in the widest of the page's fonts."""
_FAR = 3.0
"""A limit so many times above the widest bar is not drawn: the bars would be too small to read."""


def draw_memory(
    bars: Sequence[Bar],
    limit_bytes: int | None,
    *,
    name: str = "plan-memory",
    most_bytes: float | None = None,
) -> str:
    """The bars as SVG, with ticks where reserved, the device's use and its limit are.

    Args:
        name: Of the picture, no other of whose page has it.
        most_bytes: Where a longer bar is cut off; None: the longest is drawn whole.
    """
    widest = _widest(bars)
    limit = limit_bytes if limit_bytes is not None and shows_limit(bars, limit_bytes) else None
    end = min(max(widest, limit or 0.0), most_bytes or widest + (limit or 0.0))
    unit, size = ("GiB", 2**30) if end >= 2**30 else ("MiB", 2**20)

    def paint(axes: Axes) -> None:
        _stack(axes, bars, MEMORY_COLOURS, unit=size)
        for bar, top, bottom in _rows(bars):
            beyond = max(0.0, bar.device - bar.total) / size
            middle, height = (top + bottom) / 2, bottom - top
            axes.barh(middle, beyond, height, left=bar.total / size, color=LINE, linewidth=0)
            if bar.device > end:
                axes.plot(1.015 * end / size, middle, marker=">", color=INK, markersize=6)
            elif beyond:
                _tick(axes, bar.reserved / size, top + 5, bottom, color=MUTED, linewidth=1.2)
                _tick(axes, bar.device / size, top, bottom, color=INK, linewidth=1.8)
            if limit is not None:
                _tick(axes, limit / size, top - 3, bottom + 4, color=RED, linewidth=2.2)
        axes.set_xlim(0, 1.03 * end / size)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} {unit}"))
        axes.set_title("Memory of one rank")

    svg = draw(name, paint, size_inches=_size(bars))
    return _with_tooltips(svg, name, bars, format_bytes)


def shows_limit(bars: Sequence[Bar], limit_bytes: int) -> bool:
    """Whether the limit is near enough to be drawn."""
    return limit_bytes <= _FAR * _widest(bars)


def draw_time(bars: Sequence[Bar], *, name: str = "plan-time") -> str:
    """The bars as SVG; ``name`` is as of ``draw_memory``."""

    def paint(axes: Axes) -> None:
        _stack(axes, bars, TIME_COLOURS, unit=1.0)
        axes.set_xlim(0, 1.03 * max(bar.total for bar in bars))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(seconds_tick))
        axes.set_title("Time of one step")

    svg = draw(name, paint, size_inches=_size(bars))
    return _with_tooltips(svg, name, bars, format_seconds)


# --- as figures ---------------------------------------------------------------------------------


def figures(
    plan: Plan, search: Search | None, needed: Sequence[tuple[str, MemoryEstimate]]
) -> Panels:
    """Return memory next to step time, each with its legend.

    Without a known speed: only memory.
    """
    stacked, steps = memory_bars(plan, search, needed), time_bars(plan, search)
    return side_by_side(stacked, steps, plan.memory_limit_bytes)


def side_by_side(
    stacked: Sequence[Bar],
    steps: Sequence[Bar],
    limit: int | None,
    *,
    prefix: str = "",
    most_bytes: float | None = None,
) -> Panels:
    """Return bars of memory next to bars of step time, each with its legend.

    Args:
        steps: None where the speed is unknown: then only memory is drawn.
        limit: Bytes of a device.
        prefix: Prefix of the pictures' names, to distinguish them from others of their page.
        most_bytes: See ``draw_memory``.
    """
    keys = [*_keys(stacked, MEMORY_COLOURS), *_memory_keys(stacked, limit)]
    if most_bytes is not None and _widest(stacked) > most_bytes:
        keys.append("\N{BLACK RIGHT-POINTING TRIANGLE} goes on")
    memory = Chart(
        f"{prefix}memory-picture",
        draw_memory(stacked, limit, name=f"{prefix}plan-memory", most_bytes=most_bytes),
        keys=(("", tuple(keys)),),
        is_wide=not steps,
    )
    if not steps:
        return Panels([memory])
    computed, lost = _keys(steps, OWN_COLOURS), _keys(steps, LOST_COLOURS)
    time = Chart(
        f"{prefix}time-picture",
        draw_time(steps, name=f"{prefix}plan-time"),
        keys=(("computes", tuple(computed)), ("lost to", tuple(lost))),
    )
    return Panels([memory, time])


def _memory_keys(bars: Sequence[Bar], limit: int | None) -> Iterator[str]:
    if any(bar.device > bar.total for bar in bars):
        yield Text("reserved by the allocator", colour="muted", kind="tick")
        yield Text("device, as its driver shows", colour="ink", kind="tick")
    if limit is None:
        yield "the limit is not known"
    elif shows_limit(bars, limit):
        yield Text(f"limit, {format_bytes(limit)}", colour="red", kind="tick")
    else:
        yield f"the limit, {format_bytes(limit)}, is far to the right"


def _keys(bars: Sequence[Bar], colours: dict[str, str]) -> list[str]:
    there = {name for bar in bars for name, _ in bar.parts}
    return [Text(name, colour=tint) for name, tint in colours.items() if name in there]


# --- bars ---------------------------------------------------------------------------------------


def _lines(bar: Bar) -> list[str]:
    kept = re.sub(r"(micro-batch|recompute) ", "\\1\N{NO-BREAK SPACE}", bar.name)
    return wrap(kept, _LABEL_CHARACTERS, break_on_hyphens=False)


def _row_pt(bars: Sequence[Bar]) -> float:
    most = max(len(_lines(bar)) for bar in bars) + 1
    return most * _LINE_PT + _BAR_PT + _GAP_PT


def _size(bars: Sequence[Bar]) -> tuple[float, float]:
    return _WIDTH, (len(bars) * _row_pt(bars) + _AROUND_PT) / 72


def _rows(bars: Sequence[Bar]) -> list[tuple[Bar, float, float]]:
    """Each bar with its upper and lower edge, in points below the axes' top."""
    row = _row_pt(bars)
    tops = [number * row + row - _BAR_PT - _GAP_PT for number in range(len(bars))]
    return [(bar, top, top + _BAR_PT) for bar, top in zip(bars, tops, strict=True)]


def _widest(bars: Sequence[Bar]) -> float:
    return max(max(bar.total, bar.device) for bar in bars)


def _stack(axes: Axes, bars: Sequence[Bar], colours: dict[str, str], *, unit: float) -> None:
    for number, (bar, top, bottom) in enumerate(_rows(bars)):
        left = 0.0
        for place, (name, size) in enumerate(bar.parts):
            (patch,) = axes.barh(
                (top + bottom) / 2, size / unit, bottom - top, left=left / unit, linewidth=0.5,
                color=colour(colours.get(name, "grey")), edgecolor=colour("card"),
            )  # fmt: skip
            patch.set_gid(f"part-{number}-{place}")
            left += size
        _name(axes, bar, top, weight="bold" if number == 0 else "normal")
    axes.set_ylim(len(bars) * _row_pt(bars), 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)


def _name(axes: Axes, bar: Bar, top: float, *, weight: str) -> None:
    """A bar's name and numbers, line by line above it."""
    lines = _lines(bar)
    for place, text in enumerate([*lines, bar.numbers]):
        is_name = place < len(lines)
        axes.annotate(
            text, (0, top - (len(lines) + 1 - place) * _LINE_PT), va="top", fontsize=8,
            color=INK if is_name else MUTED, fontweight=weight if is_name else "normal",
            annotation_clip=False, parse_math=False,
        )  # fmt: skip


def _tick(axes: Axes, x: float, top: float, bottom: float, *, color: str, linewidth: float) -> None:
    axes.plot(
        [x, x], [top, bottom], color=color, linewidth=linewidth, solid_capstyle="butt",
        clip_on=False,
    )  # fmt: skip


def _with_tooltips(svg: str, name: str, bars: Sequence[Bar], unit: Callable[[float], str]) -> str:
    """Each part says its name and size under the pointer, without any script."""

    def titled(match: re.Match[str]) -> str:
        number, place = int(match[1]), int(match[2])
        part, size = bars[number].parts[place]
        return f"{match[0]}<title>{escape(sanitize(part))}: {unit(size)}</title>"

    return re.sub(rf'<g id="{name}-part-(\d+)-(\d+)">', titled, svg)


# Offers by time and price, both logarithmic, with labels that keep out of each other's way.

_SIZE_INCHES = (5.0, 3.7)
_TIMES_S = (1, 10, 60, 600, 3600, 10_800, 36_000, 86_400, 259_200, 864_000, 2_592_000, 8_640_000,
            31_536_000, 94_608_000, 315_360_000)  # fmt: skip
"""Ticks of a logarithmic axis of time: 1 s to 10 years, round in their unit."""
_MOST_TICKS = 7
_NEAR_PT, _FAR_PT = 5.0, 44.0
"""Between a point and its label."""
_AIR_PIXELS = 2.0
"""Around a label; pages use narrower fonts than the one that is measured here."""

Point = tuple[float, float, str]
"""Seconds, dollars, name."""


def draw_quotes(quotes: ClusterQuotes) -> str:
    """The Pareto front as SVG: each point an offer, the picked one in another colour."""
    return draw("plan-offers", lambda axes: _paint(axes, quotes), size_inches=_SIZE_INCHES)


def _paint(axes: Axes, quotes: ClusterQuotes) -> None:
    front, picked = quotes.quotes, quotes.selected
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
    points = sorted({(o.wall_s, o.usd, o.name) for o in (*front, *_optional(picked))})
    _label(axes, points, corners=list(zip(times, prices, strict=True)))


def _optional(quote: ClusterQuote | None) -> Iterator[ClusterQuote]:
    if quote is not None:
        yield quote


def _limit(axes: Axes, times: Sequence[float], prices: Sequence[float]) -> None:
    """Room around the points, and round ticks."""
    left, right = _around(times)
    bottom, top = _around(prices)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.xaxis.set_major_locator(FixedLocator(_fewer_ticks(_time_ticks(left, right))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: format_seconds(s)))
    axes.yaxis.set_major_locator(FixedLocator(_fewer_ticks(_round_ticks(bottom, top))))
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


def _fewer_ticks(ticks: Sequence[float]) -> Sequence[float]:
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
        for offset in _label_offsets():
            text = _annotate(axes, name, (time_s, usd), offset)
            box = text.get_window_extent().padded(_AIR_PIXELS)
            lead = _lead(axes, (time_s, usd), offset, scale=figure.dpi / 72)
            is_free = not any(box.overlaps(other) for other in taken)
            if is_free and _holds(room, box) and not _overlaps_any(lead, names):
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


def _label_offsets() -> Iterator[tuple[float, float]]:
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


def _overlaps_any(lead: Sequence[Bbox], names: Sequence[Bbox]) -> bool:
    return any(box.overlaps(name) for box in lead for name in names)


def _draw_lead(axes: Axes, point: tuple[float, float], offset: tuple[float, float]) -> None:
    axes.annotate(
        "", point, xytext=offset, textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 2.5},
    )  # fmt: skip
