"""The page of a comparison: one file that opens from disk, without network and without script.

The axis is chosen, and runs are hidden, by inputs that the style sheet reads.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from shardyard.errors import RequestError
from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.compare.comparison import ComparedRun, RunComparison, compare
from shardyard.report.compare.curves import AXES
from shardyard.report.compare.line_styles import line_style_of
from shardyard.report.compare.statistics import (
    BETWEEN_RUNS,
    CONFIDENCE,
    SMALLEST_EFFECT,
    SpeedComparison,
)
from shardyard.report.compare.targets import Target
from shardyard.report.html import (
    charts_unavailable_reason,
    esc,
    render_page,
    render_section,
    render_table,
)
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from shardyard.units import (
    ABSENT,
    format_bytes,
    format_count,
    format_nats,
    format_seconds,
    format_usd,
)

# The tables of a comparison in words: the same cells in the terminal and on the page.

Table = tuple[list[str], list[list[str]]]
"""Heads, a # before those of numbers, and rows."""


def runs_table(comparison: RunComparison) -> Table:
    """A row a run."""
    heads = [
        "run", "state", "#steps", "#loss", "#held-out loss", "#a second", "#peak memory",
        "#wall time", "#cost",
    ]  # fmt: skip
    return heads, [_run_row(run) for run in comparison.runs]


def _run_row(run: ComparedRun) -> list[str]:
    summary = run.summary
    rate, peak, cost = summary.tokens_per_s, summary.peak_memory_bytes, summary.cost
    return [
        run.id,
        summary.state,
        f"{summary.steps_done:,}",
        format_nats(summary.loss),
        format_nats(summary.eval_loss),
        ABSENT if rate is None else f"{format_count(rate)} {summary.unit}s",
        ABSENT if peak is None else format_bytes(peak),
        format_seconds(summary.wall_s),
        ABSENT if cost is None else format_usd(cost.so_far_usd),
    ]


def speeds_table(comparison: RunComparison) -> Table:
    """A row a side but the first."""
    heads = [
        "against the first",
        "verdict",
        "#step time",
        "#interval",
        "#all steps",
        "#steps",
        "why",
    ]
    rows = [
        [side.name, speed.verdict, *_numbers(speed), _reason(speed)]
        for side, speed in zip(comparison.sides[1:], comparison.speeds, strict=True)
    ]
    return heads, rows


def _numbers(speed: SpeedComparison) -> list[str]:
    steps = f"{speed.steps[0]:,} and {speed.steps[1]:,}"
    if speed.ratio is None or speed.low is None or speed.high is None:
        return [ABSENT, ABSENT, ABSENT, steps]
    means = speed.ratio_of_means
    return [
        f"{speed.ratio:.3f}",
        f"{speed.low:.3f} to {speed.high:.3f}",
        ABSENT if means is None else f"{means:.3f}",
        steps,
    ]


def _reason(speed: SpeedComparison) -> str:
    return f"{speed.why}; {speed.how}" if speed.how else speed.why


def excluded_steps_text(comparison: RunComparison) -> str:
    """Return the number of steps left out of the speed comparison, for each run that has any."""
    told = [
        f"of {run.id} {sum(run.excluded_steps.values()):,} ("
        + ", ".join(f"{number:,} {reason}" for reason, number in run.excluded_steps.items())
        + ")"
        for run in comparison.runs
        if run.excluded_steps
    ]
    return f"Steps left out: {'; '.join(told)}." if told else "No step is left out."


def targets_table(comparison: RunComparison) -> Table:
    """A row a target and run; no rows: there is no target."""
    heads = ["target", "run", "#step", "#samples", "#tokens or images", "#time", "#cost", ""]
    rows = []
    for each in comparison.targets:
        at = each.at
        asked = ", ".join(f"{name} {value:g}" for name, value in each.target.items())
        hours, usd = at.get("hours"), at.get("dollars")
        rows.append(
            [
                asked,
                each.run,
                *(_count(at.get(axis)) for axis in ("steps", "samples", "tokens")),
                ABSENT if hours is None else format_seconds(hours * 3600),
                ABSENT if usd is None else format_usd(usd),
                each.why_not,
            ]
        )
    return heads, rows


def _count(number: float | None) -> str:
    return ABSENT if number is None else f"{number:,.0f}"


def settings_table(comparison: RunComparison) -> Table:
    """A row a setting that differs."""
    return ["setting", *_columns(comparison)], [[e.name, *e.values] for e in comparison.settings]


def environment_table(comparison: RunComparison) -> Table:
    """A row a fact that differs."""
    rows = [[each.name, *each.values] for each in comparison.environment]
    return ["around them", *_columns(comparison)], rows


def _columns(comparison: RunComparison) -> list[str]:
    return [run.id for run in comparison.runs]


Charts = dict[str, dict[str, str]]
"""SVG by axis and name."""

_VERDICTS = {"faster": "finished", "slower": "failed", "inconclusive": "open"}
"""Class of the badge of each: green, red, grey."""


def render_comparison(comparison: RunComparison, charts: Charts, *, no_charts_reason: str) -> str:
    """The whole page.

    Args:
        no_charts_reason: Why there are none.
    """
    why = no_charts_reason or "No run has finished a step."
    parts = [
        _header(comparison),
        _section("runs", "Runs", runs_table(comparison)),
        _speed(comparison),
        _targets(comparison),
        _curves(comparison, charts, why),
        _settings(comparison),
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    footer = (
        f"Written {written} by <code>shardyard compare</code>. Every number of a run is read from "
        "its own folder; what else is shown changes none."
    )
    title = f"{comparison.sides[0].name} and {len(comparison.runs) - 1} more, compared"
    return render_page(title, "\n".join(parts), footer=footer, css=_css(comparison, charts))


def _header(comparison: RunComparison) -> str:
    sides = len(comparison.sides)
    count = f"{len(comparison.runs)} runs" + (
        f" in {sides} sides" if sides < len(comparison.runs) else ""
    )
    return f"""<header>
<p class="eyebrow">Comparison</p>
<h1>{esc(count)}</h1>
<p class="lead">Speeds are held to the first: {esc(comparison.sides[0].name)}.</p>
</header>"""


def _section(name: str, title: str, table: Table, *, after: str = "") -> str:
    heads, rows = table
    cells = [[esc(cell) for cell in row] for row in rows]
    body = f'<div class="card">{render_table(heads, cells)}{after}</div>'
    return render_section(name, title, body)


def _speed(comparison: RunComparison) -> str:
    heads, rows = speeds_table(comparison)
    cells = [
        [esc(row[0]), _badge(speed), *(esc(cell) for cell in row[2:])]
        for row, speed in zip(rows, comparison.speeds, strict=True)
    ]
    note = (
        "Step time against the first for the same work: 1.05 is 5 % slower. The interval holds "
        f"the ratio {CONFIDENCE:.0%} of the time, each comparison by itself; neighbouring steps "
        "are not taken for independent. A verdict needs an interval without 1 and an effect of "
        f"{SMALLEST_EFFECT:.0%}; what is inconclusive is not shown to be equal. Two runs of one "
        f"recipe are taken to differ by {BETWEEN_RUNS:.0%} until three of each, in turn, show by "
        "how much. “all steps” is the ratio of plain means, the slowest steps in full."
    )
    left = f'<p class="note">{esc(excluded_steps_text(comparison))}</p>'
    body = (
        f'<div class="card">{render_table([*heads[:-1], ""], cells)}'
        f'<p class="note">{esc(note)}</p>{left}</div>'
    )
    return render_section("speed", "Speed", body)


def _badge(speed: SpeedComparison) -> str:
    return f'<span class="badge {_VERDICTS[speed.verdict]}">{esc(speed.verdict)}</span>'


def _targets(comparison: RunComparison) -> str:
    table, title = targets_table(comparison), "Time and cost to a target"
    if not table[1]:
        text = (
            "No run has a target (run.target). Name one for all: "
            "<code>shardyard compare --target loss=2.0 ...</code>"
        )
        return render_section("targets", title, f'<p class="muted">{text}</p>')
    note = (
        '<p class="note">At the end of the first evaluation that reached it; between '
        "evaluations it is unknown. Time is without waiting between attempts.</p>"
    )
    return _section("targets", title, table, after=note)


def _curves(comparison: RunComparison, charts: Charts, reason: str) -> str:
    if not charts:
        return render_section("curves", "Curves", f'<p class="muted">{esc(reason)}</p>')
    first = next(iter(charts))
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{axis}"{" checked" * (axis == first)}>'
        f'<label for="axis-{axis}">{axis}</label>'
        for axis in charts
    )
    shown = "".join(
        f'<label class="side"><input type="checkbox" id="show-{side.number}" checked>'
        f"{line_style_of(side.number).swatch()}{esc(side.name)}</label>"
        for side in comparison.sides
    )
    panels = "".join(
        f'<div class="panels" id="against-{axis}">'
        + "".join(f'<figure id="{esc(name)}-{axis}">{svg}</figure>' for name, svg in drawn.items())
        + "</div>"
        for axis, drawn in charts.items()
    )
    missing = [axis for axis in AXES if axis not in charts]
    note = "" if not missing else f" No run knows its {' or '.join(missing)}."
    text = (
        "Each step once: what was done again counts the last time. A gap is what was not measured. "
        f"Of many steps the medians of sixtieths of a run are drawn.{note}"
    )
    body = (
        f'<div class="choice"><span class="muted">against</span>{choices}</div>'
        f'<div class="sides">{shown}</div>{panels}<p class="note">{esc(text)}</p>'
    )
    return render_section("curves", "Curves", body)


def _settings(comparison: RunComparison) -> str:
    heads, rows = settings_table(comparison)
    note = "Every default and auto resolved; run.id and run.dir are each run's own."
    after = f'<p class="note">{esc(note)}</p>'
    if not rows:
        after = f'<p>No setting differs.</p><p class="note">{esc(note)}</p>'
    table = render_table(heads, [_codes(row) for row in rows]) if rows else ""
    around = environment_table(comparison)
    below = render_table(around[0], [_codes(row) for row in around[1]]) if around[1] else ""
    body = f'<div class="card">{table}{after}{below}</div>'
    return render_section("settings", "What differs", body)


def _codes(row: Sequence[str]) -> list[str]:
    return [f"<code>{esc(cell)}</code>" for cell in row]


def _css(comparison: RunComparison, charts: Charts) -> str:
    """Return the CSS that shows the pictures and curves of each choice on the page."""
    rules = [
        f"main:has(#axis-{axis}:not(:checked)) #against-{axis} {{ display: none; }}"
        for axis in charts
    ]
    rules += [
        f'main:has(#show-{side.number}:not(:checked)) [id*="-side-{side.number}-run-"] '
        "{ display: none; }"
        for side in comparison.sides
    ]
    return "\n".join(rules)


# From run folders to a comparison, and to its page.


def write_comparison(
    sides: Sequence[Sequence[RunDir]], page: Path, *, target: Target
) -> RunComparison:
    """Compare runs and write the page; without pictures where drawing is impossible.

    Args:
        sides: The runs of each side, the baseline first.
        target: Metric -> value; empty: what the runs' own run.target asks for.

    Raises:
        RequestError: Fewer than two sides are given, a run is named twice or has not begun, or none
            is evaluated by a metric of the target.
        StorageError: The page cannot be written.
    """
    _check_sides(sides)
    records = [[read_run(run) for run in side] for side in sides]
    comparison = compare(records, target=target)
    why_none = charts_unavailable_reason()
    drawn = {} if why_none else _render_charts(comparison)
    write_text(page, render_comparison(comparison, drawn, no_charts_reason=why_none))
    if why_none:
        warn(why_none)
    return comparison


def _check_sides(sides: Sequence[Sequence[RunDir]]) -> None:
    if len(sides) < 2:
        raise RequestError(
            "a comparison needs two sides. Name another run after a space; `shardyard report RUN` "
            "shows a single one."
        )
    named: set[Path] = set()
    for run in (run for side in sides for run in side):
        if run.path in named:
            raise RequestError(
                f"RUN {run.run_id} is named twice, but a comparison needs different runs. Name "
                "each run once."
            )
        named.add(run.path)


def _render_charts(comparison: RunComparison) -> Charts:
    from shardyard.report.compare.charts import render_charts  # matplotlib: half a second

    return render_charts(comparison)
