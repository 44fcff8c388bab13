"""Charts of a comparison of studies as inline SVG: efficiency and rate, one line a side."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from shardyard.report.charts import MUTED, colour, draw
from shardyard.report.compare.line_styles import line_style_of
from shardyard.report.study.compare import SizeComparison, StudyComparison

Value = Callable[[SizeComparison], float | None]

_SIZE_INCHES = (5.0, 3.0)


def comparison_panels(comparison: StudyComparison) -> dict[str, str]:
    """Name -> SVG."""

    def paint_efficiency(axes: Axes) -> None:
        _lines(
            axes,
            comparison,
            lambda size: None if size.efficiency is None else 100 * size.efficiency,
        )
        axes.axhline(100, color=MUTED, linestyle=(0, (1, 2)), linewidth=1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        _finish(axes, comparison, f"Efficiency against {comparison.base} accelerators")

    def paint_rate(axes: Axes) -> None:
        _lines(axes, comparison, lambda size: size.rate)
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
        _finish(axes, comparison, f"{comparison.unit.capitalize()} per second, all accelerators")

    return {
        "efficiency": draw("beside-efficiency", paint_efficiency, size_inches=_SIZE_INCHES),
        "throughput": draw("beside-throughput", paint_rate, size_inches=_SIZE_INCHES),
    }


def _lines(axes: Axes, comparison: StudyComparison, value: Value) -> None:
    for side in range(len(comparison.sides)):
        known = [
            (size.accelerators, found)
            for size in comparison.sizes
            if size.side == side and (found := value(size)) is not None
        ]
        look = line_style_of(side)
        axes.plot(
            [size for size, _ in known], [found for _, found in known], marker="o", markersize=4.5,
            color=colour(look.colour), linestyle=look.matplotlib_dashes,
            label=comparison.name(side),
        )  # fmt: skip


def _finish(axes: Axes, comparison: StudyComparison, title: str) -> None:
    sizes = sorted({size.accelerators for size in comparison.sizes})
    axes.set_title(title)
    axes.set_xlabel("accelerators")
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, labelcolor=MUTED, fontsize=7.5
    )
