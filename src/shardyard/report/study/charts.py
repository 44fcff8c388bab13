"""Pictures of a study as inline SVG: efficiency, throughput, epoch time, memory, cost, the step.

A line joins neighbouring sizes that were measured or published and that scale. None goes
through a size that failed, that changed its settings, or that was not measured. Predicted
and extrapolated values are drawn as the band of their possible values, and never as a line.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from shardyard.report.charts import BLUE, GREY, MUTED, ORANGE, RED, colour, draw, seconds_tick
from shardyard.report.study.rows import ScalingSeries
from shardyard.report.study.values import Values, values_of

Paint = Callable[[Axes, Sequence[Values]], None]

_SIZE_INCHES = (5.0, 3.0)
_STACK = ("blue", "orange", "green", "purple", "teal", "amber", "brown", "pink", "grey", "red")
_BAND_OPACITY = 0.36
_KNOWN = ("measured", "published")
_AIR = 0.06
"""Share of a range of values that is free above the highest."""
_TO_FILL = 8
"""Sizes with a label each on an axis; of more, every second one has."""


def panels(series: ScalingSeries, prefix: str) -> dict[str, str]:
    """The pictures that a series has numbers for: name -> SVG.

    Args:
        prefix: Ids of its pictures begin so; of several series on a page each needs another.
    """
    rows = values_of(series)
    painters: dict[str, tuple[tuple[str, ...], Paint]] = {
        "efficiency": (("efficiency", "predicted_efficiency"), _paint_efficiency),
        "throughput": (("per_accelerator",), _paint_rate),
        "epoch": (("epoch_s",), _paint_epoch),
        "memory": (("memory_bytes", "predicted_memory_bytes"), _paint_memory),
        "cost": (("usd_per_epoch",), _paint_cost),
        "step": (("terms", "predicted_terms"), _paint_step),
    }
    drawn = {}
    for name, (keys, paint) in painters.items():
        if sum(any(row[key] for key in keys) for row in rows) > 1:
            drawn[name] = draw(f"{prefix}-{name}", _ready(paint, rows), size_inches=_SIZE_INCHES)
    return drawn


def _ready(paint: Paint, rows: Sequence[Values]) -> Callable[[Axes], None]:
    return lambda axes: paint(axes, rows)


# --- each picture -------------------------------------------------------------------------------


def _paint_efficiency(axes: Axes, rows: Sequence[Values]) -> None:
    _fill(axes, rows, "predicted_efficiency", scale=100, label="predicted", color=ORANGE)
    _fill(axes, rows, "extrapolated_efficiency", scale=100, label="extrapolated", color=GREY)
    _join(axes, rows, "efficiency", scale=100)
    _whiskers(axes, rows)
    axes.axhline(100, color=MUTED, linestyle=(0, (1, 2)), linewidth=1)
    shown = [
        100 * row[key]
        for row in rows
        for name in ("efficiency", "predicted_efficiency", "extrapolated_efficiency")
        for key in (name, f"{name}_low", f"{name}_high")
        if row[key] is not None
    ]
    top = max([104.0, *shown])
    bottom = max(0.0, min(shown, default=0.0) - 10)
    axes.set_ylim(bottom, top + _AIR * (top - bottom))  # a marker at the top is whole
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    _finish(axes, rows, "Efficiency against the smallest size")


def _paint_rate(axes: Axes, rows: Sequence[Values]) -> None:
    key = "tokens_per_s" if any(row["tokens_per_s"] for row in rows) else "samples_per_s"
    _join(axes, rows, key)
    for origin, color in (("predicted", ORANGE), ("extrapolated", GREY), ("not run", GREY)):
        for row in (row for row in rows if row["origin"] == origin and row[key]):
            ends = row["rate_low_share"] or 1.0, row["rate_high_share"] or 1.0
            _bar(axes, row["accelerators"], *(row[key] * end for end in ends), color=color)
    base = next((row for row in rows if row[key]), None)
    if base is not None:
        each = base[key] / base["accelerators"]
        _ideal(axes, rows, lambda count: each * count)
    _both_logarithmic(axes)
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    name = "Tokens" if key == "tokens_per_s" else "Samples"
    _finish(axes, rows, f"{name} per second, all accelerators")


def _paint_epoch(axes: Axes, rows: Sequence[Values]) -> None:
    _join(axes, rows, "epoch_s")
    for row in (row for row in rows if row["origin"] not in _KNOWN and row["epoch_s"]):
        ends = row["rate_low_share"] or 1.0, row["rate_high_share"] or 1.0
        color = ORANGE if row["origin"] == "predicted" else GREY
        _bar(axes, row["accelerators"], *(row["epoch_s"] / end for end in ends), color=color)
    base = next((row for row in rows if row["ideal_epoch_s"]), None)
    if base is not None:
        work_s = base["ideal_epoch_s"] * base["accelerators"]
        _ideal(axes, rows, lambda count: work_s / count)
    _both_logarithmic(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(seconds_tick))
    _finish(axes, rows, "Time of an epoch")


def _paint_memory(axes: Axes, rows: Sequence[Values]) -> None:
    keys = ("memory_bytes", "predicted_memory_bytes")
    most = max(row[key] or 0 for row in rows for key in keys)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    _join(axes, rows, "memory_bytes", scale=1 / size)
    known = [row for row in rows if row["predicted_memory_bytes"]]
    if known:
        axes.plot(
            [row["accelerators"] for row in known],
            [row["predicted_memory_bytes"] / size for row in known],
            "_", color=ORANGE, markersize=12, label="predicted",
        )  # fmt: skip
    base, key = next((row, key) for row in rows for key in keys if row[key])
    whole = base[key] * base["accelerators"] / size
    _ideal(axes, rows, lambda count: whole / count, label="ideal: split evenly")
    _both_logarithmic(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _finish(axes, rows, f"Memory of a device, {unit}")


def _paint_cost(axes: Axes, rows: Sequence[Values]) -> None:
    _join(axes, rows, "usd_per_epoch")
    for row in (row for row in rows if row["origin"] not in _KNOWN and row["usd_per_epoch"]):
        ends = row["rate_low_share"] or 1.0, row["rate_high_share"] or 1.0
        color = ORANGE if row["origin"] == "predicted" else GREY
        _bar(axes, row["accelerators"], *(row["usd_per_epoch"] / end for end in ends), color=color)
    usd = next(row["usd_per_epoch"] for row in rows if row["usd_per_epoch"])
    _ideal(axes, rows, lambda _: usd)  # twice the devices for half the time cost the same
    _both_logarithmic(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"${value:,.4g}"))
    _finish(axes, rows, "Price of an epoch")


def _paint_step(axes: Axes, rows: Sequence[Values]) -> None:
    """Draw bars next to each other: a step's measured terms, and those of the plan."""
    bars = [
        (row, key, kind)
        for row in rows
        for key, kind in (("terms", "measured"), ("predicted_terms", "plan"))
        if row[key]
    ]
    names = list(dict.fromkeys(name for row, key, _ in bars for name in row[key]))
    colours = {name: colour(_STACK[place % len(_STACK)]) for place, name in enumerate(names)}
    for place, (row, key, _) in enumerate(bars):
        below = 0.0
        for name, seconds in row[key].items():
            axes.bar(place, seconds, 0.7, bottom=below, color=colours[name], linewidth=0)
            below += seconds
    for name in names:
        axes.bar(0, 0, color=colours[name], label=name)
    axes.set_xticks(range(len(bars)), [f"{row['accelerators']}\n{kind}" for row, _, kind in bars])
    axes.yaxis.set_major_formatter(FuncFormatter(seconds_tick))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_title("Time of a step, by accelerators")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), labelcolor=MUTED, handlelength=1.0,
        borderaxespad=0.2, fontsize=7.5,
    )  # fmt: skip


# --- what they share ----------------------------------------------------------------------------


def joined(rows: Sequence[Values], key: str) -> Iterator[list[Values]]:
    """Stretches of neighbouring sizes that a line may join."""
    segment: list[Values] = []
    for row in rows:
        if row["origin"] in _KNOWN and row["is_scaling"] and row[key] is not None:
            segment.append(row)
            continue
        if row["origin"] in ("extrapolated", "predicted", "not run"):
            continue  # nobody tried it, so that it says nothing against its neighbours
        if segment:
            yield segment
        segment = []
    if segment:
        yield segment


def _join(axes: Axes, rows: Sequence[Values], key: str, *, scale: float = 1.0) -> None:
    for number, stretch in enumerate(joined(rows, key)):
        axes.plot(
            [row["accelerators"] for row in stretch], [row[key] * scale for row in stretch],
            "o-", color=BLUE, markersize=4.5,
            label=stretch[0]["origin"] if number == 0 else None,
        )  # fmt: skip
    others = [row for row in rows if row["origin"] in _KNOWN and not row["is_scaling"] and row[key]]
    if others:
        axes.plot(
            [row["accelerators"] for row in others], [row[key] * scale for row in others],
            "o", color=BLUE, markersize=5.5, fillstyle="none", label="settings changed",
        )  # fmt: skip


def _whiskers(axes: Axes, rows: Sequence[Values]) -> None:
    for row in (row for row in rows if row["efficiency_low"] is not None):
        ends = [100 * row["efficiency_low"], 100 * row["efficiency_high"]]
        axes.plot([row["accelerators"]] * 2, ends, "_-", color=BLUE, linewidth=1, markersize=7)


def _fill(
    axes: Axes, rows: Sequence[Values], key: str, *, scale: float, label: str, color: str
) -> None:
    """Draw a band for each size, and none between two sizes."""
    known = [row for row in rows if row[f"{key}_low"] is not None]
    for number, row in enumerate(known):
        low, high = scale * row[f"{key}_low"], scale * row[f"{key}_high"]
        _bar(axes, row["accelerators"], low, high, color=color, label=None if number else label)
        axes.plot([row["accelerators"]], [scale * row[key]], "_", color=color, markersize=12)


def _bar(
    axes: Axes, size: int, low: float, high: float, *, color: str, label: str | None = None
) -> None:
    axes.plot(
        [size, size], [low, high], color=color, linewidth=9, alpha=_BAND_OPACITY,
        solid_capstyle="butt", label=label,
    )  # fmt: skip


def _ideal(
    axes: Axes,
    rows: Sequence[Values],
    value: Callable[[float], float],
    *,
    label: str = "ideal",
) -> None:
    """A dotted line, which is straight as both axes are logarithmic."""
    sizes = sorted({row["accelerators"] for row in rows})
    ends = [sizes[0], sizes[-1]]
    axes.plot(ends, [value(size) for size in ends], color=MUTED, linestyle=(0, (1, 2)), label=label)


def _both_logarithmic(axes: Axes) -> None:
    """A logarithmic axis of values too, with room around all that is drawn."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    axes.set_yscale("log")
    if 0 < low <= high < math.inf:
        margin = max(1.25, (high / low) ** _AIR)
        axes.set_ylim(low / margin, high * margin)


def _finish(axes: Axes, rows: Sequence[Values], title: str) -> None:
    """Sizes on a logarithmic axis, failed ones marked on it."""
    sizes = sorted({row["accelerators"] for row in rows})
    axes.set_title(title)
    axes.set_xlabel("accelerators")
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // _TO_FILL)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    is_log = axes.get_yscale() == "log"
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if is_log else MaxNLocator(5))
    axes.yaxis.set_minor_locator(NullLocator())
    failed = [row["accelerators"] for row in rows if row["origin"] == "failed"]
    if failed:
        bottom = axes.get_ylim()[0]
        axes.plot(
            failed, [bottom] * len(failed), "x", color=RED, markersize=7, clip_on=False,
            label="failed",
        )  # fmt: skip
    axes.legend(  # below: up to five entries have no room beside a title
        loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, labelcolor=MUTED,
        handlelength=1.1, columnspacing=1.0, borderaxespad=0.2, fontsize=7.5,
    )  # fmt: skip
