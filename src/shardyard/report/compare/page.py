"""The page of a comparison: one file that opens from disk, without network and without script.

The axis is chosen, and runs are hidden, by inputs that the style sheet reads.
"""

import time
from collections.abc import Sequence

from shardyard.report.compare.comparison import Comparison
from shardyard.report.compare.curves import AXES
from shardyard.report.compare.look import look_of
from shardyard.report.compare.speed import BETWEEN_RUNS, CONFIDENCE, SMALLEST_EFFECT, Speed
from shardyard.report.compare.words import (
    Table,
    left_out_words,
    runs_table,
    settings_table,
    speeds_table,
    surroundings_table,
    targets_table,
)
from shardyard.report.markup import esc, render_page, render_section, render_table

Pictures = dict[str, dict[str, str]]
"""SVG by axis and name."""

_VERDICTS = {"faster": "finished", "slower": "failed", "inconclusive": "open"}
"""Class of the badge of each: green, red, grey."""


def render_comparison(comparison: Comparison, pictures: Pictures, *, no_pictures: str) -> str:
    """The whole page.

    Args:
        no_pictures: Why there are none.
    """
    why = no_pictures or "No run has finished a step."
    parts = [
        _header(comparison),
        _section("runs", "Runs", runs_table(comparison)),
        _speed(comparison),
        _targets(comparison),
        _curves(comparison, pictures, why),
        _settings(comparison),
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    footer = (
        f"Written {written} by <code>shardyard compare</code>. Every number of a run is read from "
        "its own folder; what else is shown changes none."
    )
    title = f"{comparison.sides[0].name} and {len(comparison.runs) - 1} more, compared"
    return render_page(title, "\n".join(parts), footer=footer, css=_css(comparison, pictures))


def _header(comparison: Comparison) -> str:
    sides = len(comparison.sides)
    count = f"{len(comparison.runs)} runs" + (
        f" in {sides} sides" if sides < len(comparison.runs) else ""
    )
    return f"""<header>
<p class="eyebrow">Comparison</p>
<h1>{esc(count)}</h1>
<p class="lead">Speeds are held to the first: {esc(comparison.sides[0].name)}.</p>
</header>"""


def _section(name: str, title: str, table: Table, *, before: str = "", after: str = "") -> str:
    heads, rows = table
    cells = [[esc(cell) for cell in row] for row in rows]
    body = f'<div class="card">{before}{render_table(heads, cells)}{after}</div>'
    return render_section(name, title, body)


def _speed(comparison: Comparison) -> str:
    heads, rows = speeds_table(comparison)
    cells = [
        [esc(row[0]), _badge(speed), *(esc(cell) for cell in row[2:])]
        for row, speed in zip(rows, comparison.speeds, strict=True)
    ]
    note = (
        f"Step time beside the first for the same work: 1.05 is 5 % slower. The interval holds the "
        f"ratio {CONFIDENCE:.0%} of the time, each comparison by itself; neighbouring steps are "
        f"not taken for independent. A verdict needs an interval without 1 and an effect of "
        f"{SMALLEST_EFFECT:.0%}; what is inconclusive is not shown to be equal. Two runs of one "
        f"recipe are taken to differ by {BETWEEN_RUNS:.0%} until three of each, in turn, show "
        "by how much. “all steps” is the ratio of plain means, the slowest steps in full."
    )
    left = f'<p class="note">{esc(left_out_words(comparison))}</p>'
    body = (
        f'<div class="card">{render_table([*heads[:-1], ""], cells)}'
        f'<p class="note">{esc(note)}</p>{left}</div>'
    )
    return render_section("speed", "Speed", body)


def _badge(speed: Speed) -> str:
    return f'<span class="badge {_VERDICTS[speed.verdict]}">{esc(speed.verdict)}</span>'


def _targets(comparison: Comparison) -> str:
    table, title = targets_table(comparison), "Time and cost to a target"
    if not table[1]:
        text = (
            "No run has a target (run.target). Name one for all: "
            "<code>shardyard compare --target loss=2.0 ...</code>"
        )
        return render_section("targets", title, f'<p class="muted">{text}</p>')
    note = (
        '<p class="note">At the end of the first evaluation that reached it; between evaluations '
        "nobody looked. Time is without waiting between attempts.</p>"
    )
    return _section("targets", title, table, after=note)


def _curves(comparison: Comparison, pictures: Pictures, why_none: str) -> str:
    if not pictures:
        return render_section("curves", "Curves", f'<p class="muted">{esc(why_none)}</p>')
    first = next(iter(pictures))
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{axis}"{" checked" * (axis == first)}>'
        f'<label for="axis-{axis}">{axis}</label>'
        for axis in pictures
    )
    shown = "".join(
        f'<label class="side"><input type="checkbox" id="show-{side.number}" checked>'
        f"{look_of(side.number).swatch()}{esc(side.name)}</label>"
        for side in comparison.sides
    )
    panels = "".join(
        f'<div class="panels" id="against-{axis}">'
        + "".join(f'<figure id="{esc(name)}-{axis}">{svg}</figure>' for name, svg in drawn.items())
        + "</div>"
        for axis, drawn in pictures.items()
    )
    missing = [axis for axis in AXES if axis not in pictures]
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


def _settings(comparison: Comparison) -> str:
    heads, rows = settings_table(comparison)
    note = "Every default and auto resolved; run.id and run.dir are each run's own."
    after = f'<p class="note">{esc(note)}</p>'
    if not rows:
        after = f'<p>No setting differs.</p><p class="note">{esc(note)}</p>'
    table = render_table(heads, [_codes(row) for row in rows]) if rows else ""
    around = surroundings_table(comparison)
    below = render_table(around[0], [_codes(row) for row in around[1]]) if around[1] else ""
    body = f'<div class="card">{table}{after}{below}</div>'
    return render_section("settings", "What differs", body)


def _codes(row: Sequence[str]) -> list[str]:
    return [f"<code>{esc(cell)}</code>" for cell in row]


def _css(comparison: Comparison, pictures: Pictures) -> str:
    """Which pictures are there for each choice, and which curves in them."""
    rules = [
        f"main:has(#axis-{axis}:not(:checked)) #against-{axis} {{ display: none; }}"
        for axis in pictures
    ]
    rules += [
        f'main:has(#show-{side.number}:not(:checked)) [id*="-side-{side.number}-run-"] '
        "{ display: none; }"
        for side in comparison.sides
    ]
    return "\n".join(rules)
