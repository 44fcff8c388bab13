"""Pictures of a plan: memory and step time as stacked bars, each with its legend."""

import re
from collections.abc import Callable, Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shardyard.planner.layouts import Search
from shardyard.planner.memory import Memory
from shardyard.planner.plan import Plan
from shardyard.report.markup import esc, swatch
from shardyard.report.plan.plan_bars import (
    LOST_COLOURS,
    MEMORY_COLOURS,
    OWN_COLOURS,
    TIME_COLOURS,
    Bar,
    memory_bars,
    time_bars,
)
from shardyard.report.plots import INK, LINE, MUTED, RED, colour, draw, seconds_tick
from shardyard.units import format_bytes, format_seconds

_WIDTH = 4.4
"""Inches: text of 8 points is then as large as the page's, beside another figure or on a phone."""
_LINE_PT = 11.0
_BAR_PT = 17.0
_GAP_PT = 9.0
_AROUND_PT = 46.0
"""Title and axis."""
_LABEL_CHARACTERS = 62
"""Of 8 points that fit the width in the widest of the page's fonts."""
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


# --- on the page ---------------------------------------------------------------------------------


def figures(plan: Plan, search: Search | None, needed: Sequence[tuple[str, Memory]]) -> str:
    """Memory beside step time, each with its legend below, as HTML; no speed: memory alone."""
    stacked, steps = memory_bars(plan, search, needed), time_bars(plan, search)
    return side_by_side(stacked, steps, plan.memory_limit_bytes)


def side_by_side(
    stacked: Sequence[Bar],
    steps: Sequence[Bar],
    limit: int | None,
    *,
    prefix: str = "",
    most_bytes: float | None = None,
) -> str:
    """Bars of memory beside bars of step time, each with its legend below, as HTML.

    Args:
        steps: None where no speed can be said: memory then stands alone.
        limit: Bytes of a device.
        prefix: Of the pictures' names, to tell them from others of their page.
        most_bytes: As of ``draw_memory``.
    """
    memory = draw_memory(stacked, limit, name=f"{prefix}plan-memory", most_bytes=most_bytes)
    memory += _memory_keys(stacked, limit)
    if most_bytes is not None and _widest(stacked) > most_bytes:
        memory = memory.replace("</figcaption>", "<span>&#9654; goes on</span></figcaption>")
    if not steps:
        return f'<figure id="{prefix}memory-picture" class="wide">{memory}</figure>'
    time = draw_time(steps, name=f"{prefix}plan-time") + _time_keys(steps)
    return (
        f'<div class="panels"><figure id="{prefix}memory-picture">{memory}</figure>'
        f'<figure id="{prefix}time-picture">{time}</figure></div>'
    )


def _memory_keys(bars: Sequence[Bar], limit: int | None) -> str:
    keys = _keys(bars, MEMORY_COLOURS)
    if any(bar.device > bar.total for bar in bars):
        keys += _key("reserved by the allocator", "muted", is_tick=True)
        keys += _key("device, as its driver shows", "ink", is_tick=True)
    if limit is None:
        keys += "<span>the limit is not known</span>"
    elif shows_limit(bars, limit):
        keys += _key(f"limit, {format_bytes(limit)}", "red", is_tick=True)
    else:
        keys += f"<span>the limit, {format_bytes(limit)}, is far to the right</span>"
    return f'<figcaption class="keys">{keys}</figcaption>'


def _time_keys(bars: Sequence[Bar]) -> str:
    return (
        f'<figcaption><div class="keys"><b>computes</b>{_keys(bars, OWN_COLOURS)}</div>'
        f'<div class="keys"><b>lost to</b>{_keys(bars, LOST_COLOURS)}</div></figcaption>'
    )


def _keys(bars: Sequence[Bar], colours: dict[str, str]) -> str:
    there = {name for bar in bars for name, _ in bar.parts}
    return "".join(_key(name, tint) for name, tint in colours.items() if name in there)


def _key(text: str, variable: str, *, is_tick: bool = False) -> str:
    return f"<span>{swatch(variable, is_tick=is_tick)}{esc(text)}</span>"


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

    def titled(found: re.Match[str]) -> str:
        number, place = int(found[1]), int(found[2])
        part, size = bars[number].parts[place]
        return f"{found[0]}<title>{esc(part)}: {esc(unit(size))}</title>"

    return re.sub(rf'<g id="{name}-part-(\d+)-(\d+)">', titled, svg)
