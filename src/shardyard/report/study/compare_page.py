"""Page and tables of a comparison of studies: one file that opens from disk."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.compare.page import Table
from shardyard.report.format import ABSENT
from shardyard.report.html import esc, render_page, render_section, render_table
from shardyard.report.matplotlib_check import charts_unavailable_reason
from shardyard.report.study.compare import (
    Scaling,
    SizeComparison,
    StudyComparison,
    StudyTable,
    compare_studies,
)
from shardyard.units import format_count


def sizes_table(comparison: StudyComparison) -> Table:
    """A row a side and a size that it has."""
    heads = [
        "#accelerators", "study", f"#{comparison.unit}/s", "#efficiency", "speed", "#step time",
        "#interval", "scaling", "#its share", "#interval",
    ]  # fmt: skip
    return heads, [
        _comparison_cells(comparison, size) for size in comparison.sizes if size.rate is not None
    ]


def _comparison_cells(comparison: StudyComparison, size: SizeComparison) -> list[str]:
    return [
        str(size.accelerators),
        comparison.name(size.side),
        ABSENT if size.rate is None else format_count(size.rate),
        ABSENT if size.efficiency is None else f"{100 * size.efficiency:.1f} %",
        *_speed(size),
        *_scaling_cells(size.scaling),
    ]


def _speed(size: SizeComparison) -> list[str]:
    speed = size.speed
    if speed is None:
        return ["", "", ""]
    if speed.ratio is None or speed.low is None or speed.high is None:
        return [speed.verdict, ABSENT, ABSENT]
    return [speed.verdict, f"{speed.ratio:.3f}", f"{speed.low:.3f} to {speed.high:.3f}"]


def _scaling_cells(scaling: Scaling | None) -> list[str]:
    if scaling is None:
        return ["", "", ""]
    ends = f"{scaling.low:.3f} to {scaling.high:.3f}"
    return [scaling.verdict, f"{scaling.ratio:.3f}", ends]


def settings_table(comparison: StudyComparison) -> Table:
    """A row a setting that differs between the runs of the smallest size."""
    return ["setting", *comparison.settings_of], [[e.name, *e.values] for e in comparison.settings]


def method_notes(comparison: StudyComparison) -> list[str]:
    """Explain the numbers: speed, scaling and intervals."""
    first = comparison.name(0)
    return [
        f"Speed: step time at a size beside that of {first} at the same size; 1.05 is 5 % slower. "
        f"Scaling: efficiency beside that of {first}, both against their {comparison.base} "
        "accelerators; 1.05 scales 5 % better. Intervals hold 95 % of the time, each by itself; "
        "inconclusive is not equal.",
        *_reasons(comparison),
    ]


def _reasons(comparison: StudyComparison) -> list[str]:
    """Why a speed has no verdict, or no number."""
    said = [
        f"{comparison.name(size.side)} on {size.accelerators}: {size.speed.why}"
        + (f"; {size.speed.how}." if size.speed.how else ".")
        for size in comparison.sizes
        if size.speed is not None and size.speed.verdict == "inconclusive"
    ]
    missing = [
        f"{comparison.name(size.side)} on {size.accelerators}"
        for size in comparison.sizes
        if size.side and size.speed is None and size.rate is not None
    ]
    if missing:
        said.append(
            f"No speed is judged of {'; '.join(missing)}: that takes the run of this size on both "
            "sides, and one has published numbers alone, or its run's folder is gone."
        )
    return said


def write_study_comparison(sides: Sequence[Sequence[StudyTable]], page: Path) -> StudyComparison:
    """Compare studies and write the page; without pictures where drawing is impossible.

    Raises:
        RequestError: The studies cannot be compared.
        StorageError: The page cannot be written.
    """
    beside = compare_studies(sides)
    why_none = charts_unavailable_reason()
    pictures = {} if why_none else _render_charts(beside)
    write_text(page, render_study_comparison(beside, pictures, no_charts_reason=why_none))
    if why_none:
        warn(why_none)
    return beside


def _render_charts(comparison: StudyComparison) -> dict[str, str]:
    from shardyard.report.study.compare_charts import comparison_panels

    return comparison_panels(comparison)


def render_study_comparison(
    comparison: StudyComparison, charts: Mapping[str, str], *, no_charts_reason: str = ""
) -> str:
    """The whole page.

    Args:
        charts: SVG by name.
        no_charts_reason: Why there are none; empty where there are.
    """
    first = comparison.name(0)
    head = (
        f'<header><p class="eyebrow">Scaling studies</p><h1>{len(comparison.sides)} studies</h1>'
        f'<p class="lead">Held to the first: {esc(first)}.</p></header>'
    )
    figures = "".join(f'<figure id="{esc(name)}">{svg}</figure>' for name, svg in charts.items())
    curves = (
        f'<div class="panels">{figures}</div>'
        if figures
        else f'<p class="muted">{esc(no_charts_reason)}</p>'
    )
    notes = "".join(f'<p class="note">{esc(text)}</p>' for text in method_notes(comparison))
    parts = [
        head,
        render_section("sizes", "Sizes", _card(sizes_table(comparison)) + notes),
        render_section("curves", "Curves", curves),
        _settings(comparison),
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    footer = f"Written {written} by <code>shardyard compare</code>, from table.json and the runs."
    return render_page(f"{first} and other studies, compared", "\n".join(parts), footer=footer)


def _settings(comparison: StudyComparison) -> str:
    heads, rows = settings_table(comparison)
    if not comparison.settings_of:
        body = '<p class="muted">No runs are there to read settings from.</p>'
    elif not rows:
        body = '<p class="muted">No setting differs.</p>'
    else:
        body = _card((heads, rows))
    text = f"Of the runs on {comparison.base} accelerators, every default resolved."
    note = f'<p class="note">{text}</p>'
    return render_section("settings", "What differs", body + note)


def _card(table: Table) -> str:
    heads, rows = table
    cells = [[esc(cell) for cell in row] for row in rows]
    return f'<div class="card">{render_table(heads, cells)}</div>'
