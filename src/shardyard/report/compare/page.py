"""The page of a comparison: one file that opens from disk, without network and without script.

The axis is chosen, and runs are hidden, by inputs that the style sheet reads.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardyard.errors import RequestError
from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.compare.comparison import ComparedRun, RunComparison, compare
from shardyard.report.compare.curves import AXES
from shardyard.report.compare.differences import Difference
from shardyard.report.compare.line_styles import line_style_of
from shardyard.report.compare.statistics import (
    BETWEEN_RUNS,
    CONFIDENCE,
    SMALLEST_EFFECT,
    SpeedComparison,
)
from shardyard.report.compare.targets import Target
from shardyard.report.document import (
    Block,
    Chart,
    Choice,
    Document,
    PageSection,
    Paragraph,
    Table,
    Text,
    code,
)
from shardyard.report.html import charts_unavailable_reason, render_html
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


def runs_table(comparison: RunComparison) -> Table:
    """A row a run."""
    heads = [
        "run", "state", "#steps", "#loss", "#validation loss", "#a second", "#peak memory",
        "#wall time", "#cost",
    ]  # fmt: skip
    return Table(heads, [_run_row(run) for run in comparison.runs])


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
        [
            side.name,
            Text(speed.verdict, kind=f"badge {_VERDICTS[speed.verdict]}"),
            *_numbers(speed),
            _reason(speed),
        ]
        for side, speed in zip(comparison.sides[1:], comparison.speeds, strict=True)
    ]
    return Table(heads, rows)


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
    return Table(heads, rows)


def _count(number: float | None) -> str:
    return ABSENT if number is None else f"{number:,.0f}"


def settings_table(comparison: RunComparison) -> Table:
    """A row a setting that differs."""
    return _differences("setting", comparison, comparison.settings)


def environment_table(comparison: RunComparison) -> Table:
    """A row a fact that differs."""
    return _differences("environment", comparison, comparison.environment)


def _differences(head: str, comparison: RunComparison, found: Sequence[Difference]) -> Table:
    rows = [[code(text) for text in (each.name, *each.values)] for each in found]
    return Table([head, *(run.id for run in comparison.runs)], rows)


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
    sides, runs = len(comparison.sides), len(comparison.runs)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    targets = targets_table(comparison)
    return render_html(
        Document(
            title=f"{comparison.sides[0].name} and {runs - 1} more, compared",
            kind="Comparison",
            heading=f"{runs} runs" + (f" in {sides} sides" if sides < runs else ""),
            head=[Paragraph(f"Each speed is against {comparison.sides[0].name}.", "lead")],
            body=[
                PageSection("runs", "Runs", [runs_table(comparison)]),
                PageSection("speed", "Speed", [*_speed(comparison)]),
                PageSection("targets", "Time and cost to a target", _targets(targets)),
                PageSection("curves", "Curves", [*_curves(comparison, charts, why)]),
                PageSection("settings", "What differs", [*_settings(comparison)]),
            ],
            footer=(
                f"Written {written} by ", code("shardyard compare"), ". Every number of a run is "
                "read from its own folder; what else is shown changes none.",
            ),
        )
    )  # fmt: skip


def terminal_blocks(comparison: RunComparison) -> list[PageSection]:
    """The tables that the verb prints."""
    tables = (
        ("runs", runs_table(comparison)),
        ("speed, against the first", speeds_table(comparison)),
        ("time and cost to a target", targets_table(comparison)),
        ("settings that differ", settings_table(comparison)),
        ("environment", environment_table(comparison)),
    )
    return [PageSection(title, title, [table]) for title, table in tables if table.rows]


def _speed(comparison: RunComparison) -> Iterator[Block]:
    yield speeds_table(comparison)
    note = (
        "Step time against the first for the same work: 1.05 is 5 % slower. The interval holds "
        f"the ratio {CONFIDENCE:.0%} of the time, each comparison by itself; neighbouring steps "
        "are not taken for independent. A verdict needs an interval without 1 and an effect of "
        f"{SMALLEST_EFFECT:.0%}; what is inconclusive is not shown to be equal. Two runs of one "
        f"recipe are taken to differ by {BETWEEN_RUNS:.0%} until three of each, in turn, show by "
        "how much. “all steps” is the ratio of plain means, the slowest steps in full."
    )
    yield Paragraph(note, "note")
    yield Paragraph(excluded_steps_text(comparison), "note")


def _targets(table: Table) -> list[Block]:
    if not table.rows:
        words = "No run has a target (run.target). Name one for all: "
        return [Paragraph((words, code("shardyard compare --target loss=2.0 ...")), "muted")]
    note = (
        "At the end of the first evaluation that reached it; between evaluations it is unknown. "
        "Time is without waiting between attempts."
    )
    return [table, Paragraph(note, "note")]


def _curves(comparison: RunComparison, charts: Charts, reason: str) -> Iterator[Block]:
    if not charts:
        yield Paragraph(reason, "muted")
        return
    options = {
        axis: [Chart(f"{name}-{axis}", svg) for name, svg in drawn.items()]
        for axis, drawn in charts.items()
    }
    toggles = [(s.number, line_style_of(s.number).swatch(), s.name) for s in comparison.sides]
    yield Choice(options, toggles)
    missing = [axis for axis in AXES if axis not in charts]
    note = "" if not missing else f" Not known for any run: {' or '.join(missing)}."
    text = (
        "Each step once: what was done again counts the last time. A gap is what was not measured. "
        f"Of many steps the medians of sixtieths of a run are drawn.{note}"
    )
    yield Paragraph(text, "note")


def _settings(comparison: RunComparison) -> Iterator[Block]:
    settings, around = settings_table(comparison), environment_table(comparison)
    yield settings if settings.rows else Paragraph("No setting differs.")
    note = "Every default and auto resolved; run.id and run.dir are each run's own."
    yield Paragraph(note, "note")
    if around.rows:
        yield around


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
