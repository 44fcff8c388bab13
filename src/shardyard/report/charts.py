"""Curves of a run as inline SVG: small panels whose colours follow the page, light or dark.

Drawn by matplotlib with marker colours that are then replaced by the page's CSS variables, and with
text kept as text, so that it uses the page's font, can be selected and scales with the panel.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from shardyard.io.sanitize import sanitize
from shardyard.report.against_plan import memory_attempt, memory_by_rank
from shardyard.report.run_data import Line, RunRecord
from shardyard.rundir.telemetry import (
    DEVICE_FIELDS,
    NODE_FIELDS,
    Field,
    TelemetrySample,
    nodes_with_telemetry,
    read_downsampled,
)
from shardyard.units import format_bytes

MAX_POINTS = 600
"""Points of one curve; more cannot be seen and make the page heavy."""

_VARIABLES = (
    "ink", "muted", "line", "card", "blue", "orange", "green", "red", "grey", "purple", "teal",
    "amber", "brown", "pink", *(f"own-{n}" for n in range(1, 5)),
    *(f"lost-{n}" for n in range(1, 13)),
)  # fmt: skip
# Any colour works as a marker as long as it is used for nothing else.
_MARKERS = {name: f"#0a0a{number:02x}" for number, name in enumerate(_VARIABLES, start=1)}


def colour(variable: str) -> str:
    """Return the marker of a page colour (``--blue`` of ``html.py``: ``blue``) in a drawing."""
    return _MARKERS[variable]


INK, MUTED, LINE = colour("ink"), colour("muted"), colour("line")
_VISIBLE = 0.01
"""Share of the longest step from which waiting for data is drawn."""

BLUE, ORANGE, GREEN = colour("blue"), colour("orange"), colour("green")
RED, GREY = colour("red"), colour("grey")

_ON_CURVES = {"facecolor": colour("card"), "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
"""Ground of words that a curve may cross."""

_MOST_BARS = 8
_REST = "measured rest"
_MEMORY_COLOURS = {
    "parameters": BLUE, "optimizer": GREEN, "gradients": ORANGE, "activations": colour("purple"),
    "logits": colour("teal"), "others": colour("amber"), _REST: GREY,
}  # fmt: skip
"""Kind of memory, by the plan's names -> its colour. A run only measures the first two, and the
sum of the others as the rest."""

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def panels(record: RunRecord) -> dict[str, str]:
    """The panels that this run has data for: name -> SVG, in the order in which they are shown.

    A curve without a value, or with only zeros, has no panel.
    """
    painters = {
        "loss": (_loss, "loss"),
        "throughput": (_throughput, "tokens_per_s"),
        "step-time": (_step_time, "step_time_s"),
        "grad-norm": (_grad_norm, "grad_norm"),
        "learning-rate": (_learning_rate, "lr"),
    }
    drawn = {
        name: draw(name, partial(paint, record=record))
        for name, (paint, key) in painters.items()
        if any(_curve(record, key)[1])
    }
    rows = _rows_with_peaks(record)
    if record.steps and rows:
        drawn["memory"] = draw("memory", partial(_memory, record=record, rows=rows))
    return drawn


_LEAST_IN_GIST = 3
"""Points of a line whose values are told to those who do not see it."""


def draw(
    name: str, paint: Callable[[Axes], object], *, size_inches: tuple[float, float] = (5.0, 2.75)
) -> str:
    """Let ``paint`` draw into one panel and return it as an ``<svg>`` whose ids begin with name."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size_inches, layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _for_page(buffer.getvalue(), name, label=_gist(axes) or name)


def _gist(axes: Axes) -> str:
    """Return the title and the values of each line, for readers who do not see the chart."""
    titles = (axes.get_title(loc) for loc in ("left", "center", "right"))
    parts = []
    for line in axes.get_lines():
        drawn: list[float] = np.asarray(line.get_ydata(), dtype=float).tolist()
        values = [y for y in drawn if math.isfinite(y)]
        if len(values) < _LEAST_IN_GIST:  # a mark
            continue
        name = str(line.get_label())
        parts.append(
            f"{'' if name.startswith('_') else f'{name}: '}{values[0]:.3g} to {values[-1]:.3g}, "
            f"lowest {min(values):.3g}, highest {max(values):.3g}"
        )
    return ". ".join(filter(None, (next(filter(None, titles), ""), "; ".join(parts[:6]))))


def _for_page(svg: str, name: str, *, label: str) -> str:
    head = f'<svg role="img" aria-label="{escape(sanitize(label))}"'
    svg = svg[svg.index("<svg") :].replace("<svg", head, 1)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # ids of several figures would meet on one page
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*?sans-serif", "var(--font)", svg)
    for variable, marker in _MARKERS.items():
        svg = svg.replace(marker, f"var(--{variable})")
    return svg.strip()


def decimate(
    xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """At most ``limit`` points that keep the shape: the lowest and highest of each bucket."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    buckets = limit // 2
    selected: list[int] = []
    for bucket in range(buckets):
        indices = range(bucket * len(xs) // buckets, (bucket + 1) * len(xs) // buckets)
        ends = {min(indices, key=lambda i: ys[i]), max(indices, key=lambda i: ys[i])}
        selected.extend(sorted(ends))
    return [xs[index] for index in selected], [ys[index] for index in selected]


def _curve(record: RunRecord, key: str) -> tuple[list[float], list[float]]:
    lines = [line for line in record.steps if line.get(key) is not None]
    return [line["step"] for line in lines], [line[key] for line in lines]


def _plot(axes: Axes, xs: Sequence[float], ys: Sequence[float], **style: Any) -> None:
    xs, ys = decimate(xs, ys)
    if len(xs) == 1:
        style = {**style, "marker": "o", "markersize": 4}
    axes.plot(xs, ys, solid_joinstyle="round", **style)


def _loss(axes: Axes, record: RunRecord) -> None:
    xs, ys = _curve(record, "loss")
    many = len(xs) > 150
    _plot(axes, xs, ys, color=BLUE, alpha=0.35 if many else 1, label=None if many else "training")
    if many:
        _plot(axes, *bucket_medians(xs, ys), color=BLUE, label="training, smoothed")
    evaluations = [line for line in record.evaluations if line["eval"].get("loss") is not None]
    if evaluations:
        steps = [line["step"] for line in evaluations]
        losses = [line["eval"]["loss"] for line in evaluations]
        axes.plot(steps, losses, "o-", color=ORANGE, markersize=3.5, label="validation")
    if record.resolved and record.resolved.data.unigram_entropy > 0:
        entropy = record.resolved.data.unigram_entropy
        axes.axhline(entropy, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            f"unigram entropy {entropy:.2f}", (0, entropy), xycoords=("axes fraction", "data"),
            xytext=(3, 3), textcoords="offset points", ha="left", color=MUTED, fontsize=8,
            bbox=_ON_CURVES,
        )  # fmt: skip
    _mark_starts(axes, record)
    _finish(axes, f"Loss, {record.loss_unit}", legend=True)


def _throughput(axes: Axes, record: RunRecord) -> None:
    xs, ys = _curve(record, "tokens_per_s")
    _plot(axes, xs, ys, color=BLUE)
    _from_zero(axes)
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    _mark_starts(axes, record)
    _finish(axes, f"Throughput, {record.unit}s per second, all ranks")


def _step_time(axes: Axes, record: RunRecord) -> None:
    xs, ys = _curve(record, "step_time_s")
    waits = _curve(record, "data_wait_s")
    has_waits = max(waits[1], default=0.0) >= _VISIBLE * max(ys)
    _plot(axes, xs, ys, color=BLUE, label="step")
    if has_waits:
        _plot(axes, *waits, color=ORANGE, label="of it, waiting for data")
    _from_zero(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(seconds_tick))
    _mark_starts(axes, record)
    _finish(axes, "Step time", legend=has_waits)


def _grad_norm(axes: Axes, record: RunRecord) -> None:
    _plot(axes, *_curve(record, "grad_norm"), color=BLUE)
    clip = record.resolved.recipe.optim.grad_clip if record.resolved else None
    if clip is not None:
        axes.axhline(clip, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            f"clipped above {clip:g}", (1, clip), xycoords=("axes fraction", "data"),
            xytext=(-2, 3), textcoords="offset points", ha="right", color=MUTED, fontsize=8,
            bbox=_ON_CURVES,
        )  # fmt: skip
    _from_zero(axes)
    _mark_starts(axes, record)
    _finish(axes, "Gradient norm, before clipping")


def _learning_rate(axes: Axes, record: RunRecord) -> None:
    _plot(axes, *_curve(record, "lr"), color=BLUE)
    _from_zero(axes)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)
    _mark_starts(axes, record)
    _finish(axes, "Learning rate")


def _rows_with_peaks(record: RunRecord) -> list[Line]:
    """Ranks whose peak is known to the end: all of a finished attempt, rank 0 of another."""
    attempt = memory_attempt(record)
    if attempt is None:
        return []
    rows = [row for row in memory_by_rank(record, attempt) if row.get("peak_bytes")]
    return rows if attempt.last("run_finished") else rows[:1]


def _memory(axes: Axes, record: RunRecord, rows: Sequence[Line]) -> None:
    """Bars of what the plan counts and of what each rank measured, stacked by kind.

    On a CPU, a rank's memory is that of its process. The part that Python and torch take before the
    model exists is left out, because nothing else would be visible.
    """
    bars = _memory_bars(record, rows)
    unit, size = ("GiB", 2**30) if max(sum(b.values()) for b in bars) >= 2**30 else ("MiB", 2**20)
    kinds = [kind for kind in _MEMORY_COLOURS if any(bar.get(kind) for bar in bars)]
    places = range(len(bars))
    below = [0.0] * len(bars)
    for kind in kinds:
        heights = [bar.get(kind, 0) / size for bar in bars]
        axes.bar(places, heights, 0.6, bottom=below, color=_MEMORY_COLOURS[kind], label=kind)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    process = _process_bytes(record, rows)
    without = f", without {format_bytes(process)} of Python" if process else " of a rank"
    axes.set_title(f"Memory{without}, {unit}")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    shown = places if len(bars) <= _MOST_BARS else (0, 1, len(bars) // 2, len(bars) - 1)
    names = [] if record.plan is None else ["plan"]
    names += [f"rank {row['rank']}" for row in rows]
    axes.set_xticks(list(shown), [names[place] for place in shown])
    axes.set_xlim(-0.8, max(len(bars) - 0.2, 2.8))
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=MUTED, handlelength=1.1,
        reverse=True,
    )  # fmt: skip


def _memory_bars(record: RunRecord, rows: Sequence[Line]) -> list[dict[str, float]]:
    """Bytes by kind: of the plan if there is one, then of each rank."""
    bars: list[dict[str, float]] = []
    if record.plan is not None:
        planned: dict[str, float] = {}
        for term in record.plan.memory:
            kind = term.name if term.name in _MEMORY_COLOURS else "others"
            planned[kind] = planned.get(kind, 0) + (term.bytes if term.name != "process" else 0)
        bars.append(planned)
    process = _process_bytes(record, rows)
    for row in rows:
        own = {
            "parameters": row.get("parameters_bytes") or 0,
            "optimizer": row.get("optimizer_bytes") or 0,
        }
        rest = max(0, row["peak_bytes"] - process - sum(own.values()))
        bars.append({**own, _REST: rest})
    return bars


def _process_bytes(record: RunRecord, rows: Sequence[Line]) -> int:
    """Bytes of a CPU process before its model exists; 0 on an accelerator."""
    if record.resolved is None or record.resolved.recipe.cluster.device != "cpu":
        return 0
    own = [
        (row.get("start_bytes") or 0)
        - (row.get("parameters_bytes") or 0)
        - (row.get("optimizer_bytes") or 0)
        for row in rows
    ]
    return max(0, min(own))


def _from_zero(axes: Axes) -> None:
    """Begin at zero, and leave room above for the words that mark starts."""
    axes.set_ylim(0, 1.18 * axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0)


def _mark_starts(axes: Axes, record: RunRecord) -> None:
    """A thin line where an attempt, a generation or a phase took over, the first one aside."""
    before: tuple[int, int] | None = None
    phase: int | None = None
    for line in record.steps:
        start = (line.get("attempt", 0), line.get("generation", 0))
        if before is not None and start != before:
            kind = "resumed" if start[0] != before[0] else "restarted"
            _mark(axes, line["step"], kind, color=RED, drop=7)
        if phase is not None and line.get("phase") != phase:
            _mark(axes, line["step"], f"phase {line['phase']}", color=MUTED, drop=16)
        before, phase = start, line.get("phase")


def _mark(axes: Axes, step: int, word: str, *, color: str, drop: int) -> None:
    """Draw a thin line before a step, and a word next to it, ``drop`` points below the top."""
    axes.axvline(step - 0.5, color=color, linewidth=0.9, alpha=0.8)
    axes.annotate(
        word, (step - 0.5, 1), xycoords=("data", "axes fraction"), xytext=(3, -drop),
        textcoords="offset points", color=color, fontsize=7.5,
    )  # fmt: skip


def _finish(axes: Axes, title: str, *, legend: bool = False, x_label: str = "step") -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if legend:  # beside the title, where no curve is
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=3, labelcolor=MUTED,
            handlelength=1.1, columnspacing=1.1, borderaxespad=0.2,
        )  # fmt: skip


def bucket_medians(
    xs: Sequence[float], ys: Sequence[float], buckets: int = 60
) -> tuple[list[float], list[float]]:
    """Medians of equal stretches: spikes do not drag the curve."""
    size = -(-len(xs) // buckets)
    starts = range(0, len(xs), size)
    return [median(xs[i : i + size]) for i in starts], [median(ys[i : i + size]) for i in starts]


def seconds_tick(value: float, _position: int) -> str:
    """``250 ms`` or ``1.5 s`` on an axis."""
    return f"{value * 1000:g} ms" if 0 < value < 1 else f"{value:g} s"


# What the devices and nodes did over the hours of a run, under the curves of its steps.
#
# A line a device while a person can tell them apart; of more the middle one, and the band of all. A
# stretch without a number is a gap.

_MOST_LINES = 8
_BUCKETS = 300
_LEAST_RATE = 1024.0
"""Bytes per second; a counter that never rises faster counts as zero and has no panel."""
_GAP = 5.0
"""Times the usual distance of samples from which a line is broken."""
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
        if (samples := read_downsampled(path, most=_MOST_SAMPLES))
    }
    times = [event["t"] for attempt in record.attempts for event in attempt.events]
    if not nodes or not times:
        return {}
    start_t = min(times)
    # the marks of an attempt that no sample is of would be far outside of the picture
    end_t = max(*times, *(samples[-1].t for samples in nodes.values()))
    span = (start_t, end_t)
    found = {}
    for field in (*DEVICE_FIELDS, *(f for f in NODE_FIELDS if f.name in _NODE_PANELS)):
        series = _series(field, nodes)
        if field.kind == "counter" and field in DEVICE_FIELDS and not field.never_rests:
            continue  # errors are told in words
        least = _LEAST_RATE if field.kind == "counter" else 0.0
        if any(value and value >= least for one in series for value in one.values):
            name = f"device-{field.name.replace('_', '-')}"
            paint = partial(_paint, field=field, series=series, record=record, span=span)
            found[name] = draw(name, paint)
    return found


def _series(field: Field, nodes: dict[int, list[TelemetrySample]]) -> list[Series]:
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
    """Convert a counter to its rate per second; one that restarts leaves a gap."""
    if field.kind == "gauge":
        return series
    rates: list[float | None] = [None]
    for (t0, v0), (t1, v1) in pairwise(zip(series.t, series.values, strict=True)):
        is_known = v0 is not None and v1 is not None and v1 >= v0 and t1 > t0
        rates.append((v1 - v0) / (t1 - t0) if is_known else None)  # type: ignore[operator]
    return Series(series.name, series.t, rates)


def in_buckets(series: Series, started_t: float, end_t: float) -> list[float]:
    """Means of equal stretches of time, nan where there is no number."""
    sums, counts = [0.0] * _BUCKETS, [0] * _BUCKETS
    width_s = max(end_t - started_t, 1e-9) / _BUCKETS
    for t, value in zip(series.t, series.values, strict=True):
        if value is not None:
            bucket = min(_BUCKETS - 1, max(0, int((t - started_t) / width_s)))
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
    start_t, end_t = span
    unit_s, unit = (3600.0, "hours") if end_t - start_t > 2 * 3600 else (60.0, "minutes")
    xs = [(k + 0.5) * (end_t - start_t) / _BUCKETS / unit_s for k in range(_BUCKETS)]
    rows = [in_buckets(one, start_t, end_t) for one in series]
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
    axes.set_xlim(0, max((end_t - start_t) / unit_s, 1e-9))
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.22 * top if top > 0 else 1.0)
    _mark_device_starts(axes, record, start_t, unit_s)
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
    """A line over buckets; where samples are rarer than buckets, from number to number.

    Between attempts there are no samples, and no line.
    """
    pairs = list(zip(xs, ys, strict=True))
    known = [(x, y) for x, y in pairs if not math.isnan(y)]
    if len(known) < len(xs) / 2:
        usual = median([b[0] - a[0] for a, b in pairwise(known)]) if len(known) > 1 else 0.0
        pairs = known[:1]
        for before, after in pairwise(known):
            if after[0] - before[0] > _GAP * usual:
                pairs.append((before[0], math.nan))
            pairs.append(after)
    style: dict[str, Any] = {"marker": "o", "markersize": 4} if len(known) == 1 else {}
    axes.plot(*zip(*pairs, strict=True), color=color, label=label, linewidth=1.1, **style)


def _mark_device_starts(axes: Axes, record: RunRecord, started_t: float, unit_s: float) -> None:
    """The parts of the newest attempt's start."""
    assert record.latest is not None
    for drop, (kind, word) in enumerate(_STARTS):
        event = record.latest.first(kind)
        if event is None:
            continue
        x = (event["t"] - started_t) / unit_s
        axes.axvline(x, color=LINE, linewidth=0.9)
        axes.annotate(
            word, (x, 1), xycoords=("data", "axes fraction"), xytext=(3, -7 - 9 * drop),
            textcoords="offset points", color=MUTED, fontsize=7.5,
        )  # fmt: skip


def _title(field: Field) -> str:
    if field.kind == "counter":
        return f"{field.title}, a second"
    units = {"_c": "°C", "_w": "W", "_mhz": "MHz"}
    unit = next((text for end, text in units.items() if field.name.endswith(end)), "")
    return f"{field.title}, {unit}" if unit else field.title


def _ticks(field: Field) -> EngFormatter | FuncFormatter:
    if field.name.endswith("utilisation"):
        return FuncFormatter(lambda value, _: f"{value:.0%}")
    if "bytes" in field.name:
        return EngFormatter(unit="B/s" if field.kind == "counter" else "B")
    return FuncFormatter(lambda value, _: f"{value:g}")
