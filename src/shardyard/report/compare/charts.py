"""Charts of compared runs: curves of several runs overlaid, for each value and each axis.

The curves of a side have one of ten colours, then the same again in other dashes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from shardyard.report.charts import bucket_medians, colour, decimate, draw
from shardyard.report.compare.comparison import ComparedRun, RunComparison
from shardyard.report.compare.curves import AXES, Curve
from shardyard.report.compare.line_styles import line_style_of

# Curves of several runs overlaid, one picture for each thing shown and each axis.

MANY_POINTS = 150
"""Count of a run's steps from which a smooth curve is drawn.

For a few runs, the raw curve is drawn under it.
"""
FEW_RUNS = 8
_POINTS, _BUCKETS = 600, 60
"""Points of one curve: raw, and smooth."""

_TOLD_BY_LOSS = ("perplexity",)
"""Its exponential: the same curve in other numbers."""

Points = Sequence[tuple[float, float]]
Style = dict[str, Any]


@dataclass(frozen=True)
class ChartedMetric:
    """One thing that is drawn against every axis."""

    name: str
    """Name of the picture: letters and hyphens."""
    title: str
    key: str
    """Key of a step's line; for an evaluation, a metric."""
    is_of_steps: bool

    def of(self, run: ComparedRun) -> Curve:
        """One run's curve of it."""
        curves = run.curves
        return curves.of_steps(self.key) if self.is_of_steps else curves.of_evaluations(self.key)


def charted_metrics(comparison: RunComparison) -> list[ChartedMetric]:
    """List the pictures for which these runs have numbers."""
    unit, loss_unit = " or ".join(comparison.units), " or ".join(comparison.loss_units)
    found = [ChartedMetric("loss", f"Training loss, {loss_unit}", "loss", is_of_steps=True)]
    metrics = dict.fromkeys(
        name
        for run in comparison.runs
        for _, scores in run.curves.evaluations
        for name, value in scores.items()
        if value is not None and name not in _TOLD_BY_LOSS
    )
    for number, metric in enumerate(metrics):
        title = metric.replace("_", " ").capitalize()
        if metric == "loss":
            title = f"Validation loss, {loss_unit}"
        found.append(ChartedMetric(f"held-out-{number}", title, metric, is_of_steps=False))
    rate = f"Throughput, {unit}s per second, all ranks"
    return [*found, ChartedMetric("throughput", rate, "tokens_per_s", is_of_steps=True)]


def render_charts(comparison: RunComparison) -> dict[str, dict[str, str]]:
    """SVG by axis and name; an axis that no run has a place on has none."""
    charts: dict[str, dict[str, str]] = {}
    for axis in AXES:
        drawn = {
            shown.name: render_chart(comparison, shown, axis)
            for shown in charted_metrics(comparison)
        }
        if any(drawn.values()):
            charts[axis] = {name: svg for name, svg in drawn.items() if svg}
    return charts


def render_chart(comparison: RunComparison, metric: ChartedMetric, axis: str) -> str:
    """One picture; empty where no run has a point in it."""
    curves = [(run, metric.of(run).segments(axis)) for run in comparison.runs]
    if not any(stretches for _, stretches in curves):
        return ""

    def paint(axes: Axes) -> None:
        for number, (run, stretches) in enumerate(curves):
            _paint(axes, run, number, stretches, metric, are_few=len(curves) <= FEW_RUNS)
        axes.set_title(metric.title)
        axes.set_xlabel(AXES[axis])
        _ticks(axes, axis)
        if metric.key == "tokens_per_s":
            axes.set_ylim(0, 1.08 * axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0)
            axes.yaxis.set_major_formatter(EngFormatter(sep=" "))

    return draw(f"{metric.name}-{axis}", paint)


def _paint(
    axes: Axes,
    run: ComparedRun,
    number: int,
    segments: Sequence[Points],
    metric: ChartedMetric,
    *,
    are_few: bool,
) -> None:
    """Draw one run's curve, broken at its gaps; the style depends only on this run."""
    if not segments:
        return
    look = line_style_of(run.side)
    style: Style = {"color": colour(look.colour), "linestyle": look.matplotlib_dashes}
    total = sum(len(stretch) for stretch in segments)
    is_smoothed = metric.is_of_steps and total > MANY_POINTS
    name = f"side-{run.side}-run-{number}"
    if not is_smoothed or are_few:
        faint = {**style, "alpha": 0.3, "linewidth": 0.9} if is_smoothed else style
        marker: Style = {} if metric.is_of_steps else {"marker": "o", "markersize": 3.5}
        xs, ys = _joined([_downsampled(stretch, total) for stretch in segments])
        axes.plot(xs, ys, gid=f"{name}-raw", solid_joinstyle="round", **faint, **marker)
    if is_smoothed:
        xs, ys = _joined([_smooth(stretch, total) for stretch in segments])
        axes.plot(xs, ys, gid=f"{name}-smooth", solid_joinstyle="round", **style)
    alone = [stretch[0] for stretch in segments if len(stretch) == 1]
    if alone and metric.is_of_steps:  # a line needs two points
        dots = [[x for x, _ in alone], [y for _, y in alone]]
        axes.plot(*dots, "o", gid=f"{name}-dots", markersize=3, color=style["color"])


def _downsampled(segment: Points, total: int) -> Points:
    """Its share of the points of a curve, the lowest and highest of each bucket."""
    limit = max(4, _POINTS * len(segment) // max(1, total))
    xs, ys = decimate(*_columns(segment), limit=limit)
    return list(zip(xs, ys, strict=True))


def _smooth(segment: Points, total: int) -> Points:
    buckets = max(1, round(_BUCKETS * len(segment) / total))
    xs, ys = bucket_medians(*_columns(segment), buckets=buckets)
    return list(zip(xs, ys, strict=True))


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _joined(segments: Sequence[Points]) -> tuple[list[float], list[float]]:
    """One line with a gap between stretches, which is no number."""
    xs: list[float] = []
    ys: list[float] = []
    for stretch in segments:
        if xs:
            xs.append(stretch[0][0])
            ys.append(nan)
        xs += [x for x, _ in stretch]
        ys += [y for _, y in stretch]
    return xs, ys


def _ticks(axes: Axes, axis: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis == "steps"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if axis in ("samples", "tokens"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    elif axis == "dollars":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda usd, _: f"${usd:g}"))
