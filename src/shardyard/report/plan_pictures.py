"""Pictures of a plan: memory and step time as stacked bars, offers by time and price.

What is drawn is a value first (``Bar``), so that its sums can be checked without a drawing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shardyard.plan.layouts import Candidate, Search
from shardyard.plan.memory import Memory
from shardyard.plan.plan import Plan, layout_name
from shardyard.plan.step_time import NAMES
from shardyard.report.markup import esc, swatch
from shardyard.report.plots import INK, LINE, MUTED, RED, colour, draw, seconds_tick
from shardyard.units import format_bytes, format_count, format_seconds

MEMORY_COLOURS = {
    "parameters": "blue",
    "gradients": "teal",
    "optimizer": "green",
    "gathered parameters": "purple",
    "unreduced gradients": "pink",
    "activations": "orange",
    "logits and loss": "amber",
    "checkpoint copy": "brown",
    "process": "grey",
}
"""Term -> variable of the style sheet."""

_OWN_COLOURS = {
    "matrix products": "own-1",
    "attention": "own-2",
    "memory-bound": "own-3",
    "vocabulary": "own-4",
}
_LOST_COLOURS = {
    "recompute": "lost-1",
    "launch": "lost-2",
    "tensor parallel": "lost-3",
    "context parallel": "lost-4",
    "expert parallel": "lost-5",
    "data parallel": "lost-6",
    "pipeline bubble": "lost-7",
    "pipeline sends": "lost-8",
    "optimizer": "lost-9",
    "offload": "lost-10",
    "stragglers": "lost-11",
}
TIME_COLOURS = {**_OWN_COLOURS, **_LOST_COLOURS}
"""Term -> variable of the style sheet: what computes is blue, what is lost is red to yellow."""

OWN_NAMES = tuple(_OWN_COLOURS)
"""The model's own work; the rest of a step is lost to something else."""

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


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar: ``parts`` by name, of bytes or seconds, and what stands above it."""

    name: str
    numbers: str
    parts: tuple[tuple[str, float], ...]
    reserved: float = 0.0
    device: float = 0.0

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(size for _, size in self.parts)


def is_planned(candidate: Candidate, plan: Plan) -> bool:
    """Whether a candidate of a search is what is planned."""
    return (candidate.layout, candidate.micro_batch, str(candidate.recompute)) == (
        plan.layout,
        plan.micro_batch,
        plan.recompute,
    )


def memory_bars(
    plan: Plan, search: Search | None, bars: Sequence[tuple[str, Memory]]
) -> tuple[Bar, ...]:
    """The plan's memory and that of the search's best, without the plan's own among them."""
    drawn = [
        Bar(
            name=_planned_name(plan, search),
            numbers=_memory_numbers(plan.memory_bytes, plan.reserved_bytes, plan.device_bytes),
            parts=tuple((term.name, term.bytes) for term in plan.memory),
            reserved=plan.reserved_bytes,
            device=plan.device_bytes,
        )
    ]
    best = search.best if search is not None else ()
    for place, (candidate, (name, needed)) in enumerate(zip(best, bars, strict=False), start=1):
        if not is_planned(candidate, plan):
            drawn.append(
                Bar(
                    name=_candidate_name(candidate, place, name=name),
                    numbers=_memory_numbers(
                        needed.allocated_bytes, needed.reserved_bytes, needed.device_bytes
                    ),
                    parts=tuple((term.name, term.bytes) for term in needed.terms),
                    reserved=needed.reserved_bytes,
                    device=needed.device_bytes,
                )
            )
    return tuple(drawn)


def time_bars(plan: Plan, search: Search | None) -> tuple[Bar, ...]:
    """The plan's step and those of the search's best; empty where no speed can be said."""
    drawn: list[Bar] = []
    if plan.step_s is not None:
        parts = tuple((term.name, term.seconds) for term in plan.time)
        numbers = _time_numbers(parts, plan.speed.tokens_per_s)
        drawn.append(Bar(name=_planned_name(plan, search), numbers=numbers, parts=parts))
    for place, candidate in enumerate(search.best if search is not None else (), start=1):
        if plan.step_s is not None and is_planned(candidate, plan):
            continue
        parts = tuple(
            (NAMES[key][0], seconds)
            for key, seconds in candidate.parts._asdict().items()
            if seconds > 0
        )
        name = _candidate_name(candidate, place, name=layout_name(candidate.layout))
        numbers = _time_numbers(parts, candidate.tokens_per_s)
        drawn.append(Bar(name=name, numbers=numbers, parts=parts))
    return tuple(drawn)


def own_share(parts: Sequence[tuple[str, float]]) -> float:
    """Share of a step that is the model's own work."""
    own_s = sum(seconds for name, seconds in parts if name in OWN_NAMES)
    return own_s / sum(seconds for _, seconds in parts)


def draw_memory(bars: Sequence[Bar], limit_bytes: int | None) -> str:
    """The bars as SVG, with ticks where reserved, the device's use and its limit are."""
    widest = _widest(bars)
    limit = limit_bytes if limit_bytes is not None and shows_limit(bars, limit_bytes) else None
    end = max(widest, limit or 0.0)
    unit, size = ("GiB", 2**30) if end >= 2**30 else ("MiB", 2**20)

    def paint(axes: Axes) -> None:
        _stack(axes, bars, MEMORY_COLOURS, unit=size)
        for bar, top, bottom in _rows(bars):
            beyond = max(0.0, bar.device - bar.total) / size
            middle, height = (top + bottom) / 2, bottom - top
            axes.barh(middle, beyond, height, left=bar.total / size, color=LINE, linewidth=0)
            if beyond:
                _tick(axes, bar.reserved / size, top + 5, bottom, color=MUTED, linewidth=1.2)
                _tick(axes, bar.device / size, top, bottom, color=INK, linewidth=1.8)
            if limit is not None:
                _tick(axes, limit / size, top - 3, bottom + 4, color=RED, linewidth=2.2)
        axes.set_xlim(0, 1.03 * end / size)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} {unit}"))
        axes.set_title("Memory of one rank")

    svg = draw("plan-memory", paint, size_inches=_size(bars))
    return _with_tooltips(svg, "plan-memory", bars, format_bytes)


def shows_limit(bars: Sequence[Bar], limit_bytes: int) -> bool:
    """Whether the limit is near enough to be drawn."""
    return limit_bytes <= _FAR * _widest(bars)


def draw_time(bars: Sequence[Bar]) -> str:
    """The bars as SVG."""

    def paint(axes: Axes) -> None:
        _stack(axes, bars, TIME_COLOURS, unit=1.0)
        axes.set_xlim(0, 1.03 * max(bar.total for bar in bars))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(seconds_tick))
        axes.set_title("Time of one step")

    svg = draw("plan-time", paint, size_inches=_size(bars))
    return _with_tooltips(svg, "plan-time", bars, format_seconds)


# --- on the page ---------------------------------------------------------------------------------


def figures(plan: Plan, search: Search | None, needed: Sequence[tuple[str, Memory]]) -> str:
    """Memory beside step time, each with its legend below, as HTML; no speed: memory alone."""
    stacked, steps = memory_bars(plan, search, needed), time_bars(plan, search)
    memory = draw_memory(stacked, plan.memory_limit_bytes)
    keys = _memory_keys(stacked, plan.memory_limit_bytes)
    if not steps:
        return f'<figure id="memory-picture" class="wide">{memory}{keys}</figure>'
    return (
        f'<div class="panels"><figure id="memory-picture">{memory}{keys}</figure>'
        f'<figure id="time-picture">{draw_time(steps)}{_time_keys(steps)}</figure></div>'
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
        f'<figcaption><div class="keys"><b>computes</b>{_keys(bars, _OWN_COLOURS)}</div>'
        f'<div class="keys"><b>lost to</b>{_keys(bars, _LOST_COLOURS)}</div></figcaption>'
    )


def _keys(bars: Sequence[Bar], colours: dict[str, str]) -> str:
    there = {name for bar in bars for name, _ in bar.parts}
    return "".join(_key(name, tint) for name, tint in colours.items() if name in there)


def _key(text: str, variable: str, *, is_tick: bool = False) -> str:
    return f"<span>{swatch(variable, is_tick=is_tick)}{esc(text)}</span>"


# --- bars ---------------------------------------------------------------------------------------


def _planned_name(plan: Plan, search: Search | None) -> str:
    best = search.best if search is not None else ()
    places = [n for n, candidate in enumerate(best, start=1) if is_planned(candidate, plan)]
    place = f", place {places[0]} of the search" if places else ""
    return (
        f"This plan{place}: {layout_name(plan.layout)}, micro-batch {plan.micro_batch}, "
        f"recompute {plan.recompute}"
    )


def _candidate_name(candidate: Candidate, place: int, *, name: str) -> str:
    how = f"micro-batch {candidate.micro_batch}, recompute {candidate.recompute}"
    return f"{place}. {name}, {how}"


def _memory_numbers(allocated: float, reserved: float, device: float) -> str:
    if allocated == reserved == device:
        return f"{format_bytes(allocated)} in all"
    return (
        f"tensors {format_bytes(allocated)}, reserved {format_bytes(reserved)}, device "
        f"{format_bytes(device)}"
    )


def _time_numbers(parts: Sequence[tuple[str, float]], tokens_per_s: float | None) -> str:
    step_s = sum(seconds for _, seconds in parts)
    rate = f", {format_count(tokens_per_s)} tokens/s" if tokens_per_s is not None else ""
    return f"{format_seconds(step_s)}{rate}, {own_share(parts):.0%} computes"


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
