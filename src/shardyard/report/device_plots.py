"""What the devices and nodes did over the hours of a run, under the curves of its steps.

A line a device while a person can tell them apart; of more the middle one, and the band of all. A
stretch without a number is a gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from shardyard.report.plots import BLUE, GREEN, GREY, LINE, MUTED, ORANGE, RED, colour, draw
from shardyard.report.run_data import RunRecord
from shardyard.rundir.telemetry import (
    DEVICE_FIELDS,
    NODE_FIELDS,
    Field,
    Sample,
    nodes_with_telemetry,
    read_thinned,
)

_MOST_LINES = 8
_BUCKETS = 300
_MOST_SAMPLES = 1200
_COLOURS = (
    BLUE, ORANGE, GREEN, RED, colour("purple"), colour("teal"), colour("amber"), colour("pink"),
)  # fmt: skip
_NODE_PANELS = ("cpu_busy_cores", "network_sent_bytes", "disk_read_bytes")
_STARTS = (("data_ready", "data"), ("model_ready", "model"), ("first_step", "first step"))


@dataclass(frozen=True)
class Series:
    """One number over time."""

    name: str
    t: Sequence[float]
    """Unix seconds."""
    values: Sequence[float | None]


def device_panels(record: RunRecord) -> dict[str, str]:
    """The panels that the run's telemetry has numbers for: name -> SVG."""
    nodes = {
        rank: samples
        for rank, path in nodes_with_telemetry(record.run).items()
        if (samples := read_thinned(path, most=_MOST_SAMPLES))
    }
    times = [event["t"] for attempt in record.attempts for event in attempt.events]
    if not nodes or not times:
        return {}
    begun_t = min(times)
    # the marks of an attempt that no sample is of would be far outside of the picture
    end_t = max(*times, *(samples[-1].t for samples in nodes.values()))
    span = (begun_t, end_t)
    found = {}
    for field in (*DEVICE_FIELDS, *(f for f in NODE_FIELDS if f.name in _NODE_PANELS)):
        series = _series(field, nodes)
        if field.kind == "counter" and field in DEVICE_FIELDS and not field.never_rests:
            continue  # errors are told in words
        if any(value is not None for one in series for value in one.values):
            name = f"device-{field.name.replace('_', '-')}"
            paint = partial(_paint, field=field, series=series, record=record, span=span)
            found[name] = draw(name, paint)
    return found


def _series(field: Field, nodes: dict[int, list[Sample]]) -> list[Series]:
    found = []
    for rank, samples in nodes.items():
        t = [sample.t for sample in samples]
        if field in NODE_FIELDS:
            values = [sample.numbers.get(field.name) for sample in samples]
            found.append(_as_drawn(field, Series(f"node {rank}", t, values)))
            continue
        count = max(len(sample.devices.get(field.name, ())) for sample in samples)
        for device in range(count):
            of_device = [
                row[device] if device < len(row := sample.devices.get(field.name, ())) else None
                for sample in samples
            ]
            found.append(_as_drawn(field, Series(f"{rank}.{device}", t, of_device)))
    return found


def _as_drawn(field: Field, series: Series) -> Series:
    """A counter as its rate a second; one that begins anew leaves a gap."""
    if field.kind == "gauge":
        return series
    rates: list[float | None] = [None]
    for (t0, v0), (t1, v1) in pairwise(zip(series.t, series.values, strict=True)):
        is_known = v0 is not None and v1 is not None and v1 >= v0 and t1 > t0
        rates.append((v1 - v0) / (t1 - t0) if is_known else None)  # type: ignore[operator]
    return Series(series.name, series.t, rates)


def in_buckets(series: Series, begun_t: float, end_t: float) -> list[float]:
    """Means of equal stretches of time, nan where there is no number."""
    sums, counts = [0.0] * _BUCKETS, [0] * _BUCKETS
    width_s = max(end_t - begun_t, 1e-9) / _BUCKETS
    for t, value in zip(series.t, series.values, strict=True):
        if value is not None:
            bucket = min(_BUCKETS - 1, max(0, int((t - begun_t) / width_s)))
            sums[bucket] += value
            counts[bucket] += 1
    return [s / n if n else math.nan for s, n in zip(sums, counts, strict=True)]


def _paint(
    axes: Axes,
    field: Field,
    series: Sequence[Series],
    record: RunRecord,
    span: tuple[float, float],
) -> None:
    begun_t, end_t = span
    unit_s, unit = (3600.0, "hours") if end_t - begun_t > 2 * 3600 else (60.0, "minutes")
    xs = [(k + 0.5) * (end_t - begun_t) / _BUCKETS / unit_s for k in range(_BUCKETS)]
    rows = [in_buckets(one, begun_t, end_t) for one in series]
    if len(rows) <= _MOST_LINES:
        for one, row, line in zip(series, rows, _COLOURS, strict=False):
            _line(axes, xs, row, color=line, label=one.name)
    else:
        columns = [[v for v in column if not math.isnan(v)] for column in zip(*rows, strict=True)]
        low = [min(c, default=math.nan) for c in columns]
        high = [max(c, default=math.nan) for c in columns]
        axes.fill_between(xs, low, high, color=GREY, alpha=0.35, linewidth=0, label="all")
        middle = [median(c) if c else math.nan for c in columns]
        _line(axes, xs, middle, color=BLUE, label=f"the middle one of {len(rows)}")
    axes.set_xlim(0, max((end_t - begun_t) / unit_s, 1e-9))
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.22 * top if top > 0 else 1.0)
    _mark_starts(axes, record, begun_t, unit_s)
    axes.yaxis.set_major_formatter(_ticks(field))
    axes.set_title(_title(field))
    axes.set_xlabel(f"{unit} since the start")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=4, labelcolor=MUTED,
        handlelength=1.1, columnspacing=1.1, borderaxespad=0.2,
    )  # fmt: skip


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[float], *, color: str, label: str) -> None:
    """A line over buckets; where samples are rarer than buckets, from number to number."""
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if not math.isnan(y)]
    is_sparse = len(known) < len(xs) / 2
    pairs = known if is_sparse else list(zip(xs, ys, strict=True))
    axes.plot(*zip(*pairs, strict=True), color=color, label=label, linewidth=1.1)


def _mark_starts(axes: Axes, record: RunRecord, begun_t: float, unit_s: float) -> None:
    """The parts of the newest attempt's start."""
    assert record.newest is not None
    for drop, (kind, word) in enumerate(_STARTS):
        event = record.newest.first(kind)
        if event is None:
            continue
        x = (event["t"] - begun_t) / unit_s
        axes.axvline(x, color=LINE, linewidth=0.9)
        axes.annotate(
            word, (x, 1), xycoords=("data", "axes fraction"), xytext=(3, -7 - 9 * drop),
            textcoords="offset points", color=MUTED, fontsize=7.5,
        )  # fmt: skip


def _title(field: Field) -> str:
    if field.kind == "counter":
        return f"{field.title}, bytes a second"
    units = {"_c": "°C", "_w": "W", "_mhz": "MHz", "_bytes": "bytes"}
    unit = next((text for end, text in units.items() if field.name.endswith(end)), "")
    return f"{field.title}, {unit}" if unit else field.title


def _ticks(field: Field) -> EngFormatter | FuncFormatter:
    if field.name.endswith("utilisation"):
        return FuncFormatter(lambda value, _: f"{value:.0%}")
    return EngFormatter(sep=" ") if "bytes" in field.name else FuncFormatter(lambda v, _: f"{v:g}")
