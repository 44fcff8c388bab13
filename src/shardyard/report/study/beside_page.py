"""The page of studies beside each other: one file that opens from disk."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.compare.words import Table
from shardyard.report.markup import esc, render_page, render_section, render_table
from shardyard.report.pictures import no_pictures
from shardyard.report.study.beside import StudiesBeside, StudyTable, compare_studies
from shardyard.report.study.beside_words import how_words, settings_table, sizes_table


def write_beside(sides: Sequence[Sequence[StudyTable]], page: Path) -> StudiesBeside:
    """Compare studies and write the page; without pictures where none can be drawn.

    Raises:
        RequestError: There is nothing to compare.
        StorageError: The page cannot be written.
    """
    beside = compare_studies(sides)
    why_none = no_pictures()
    pictures = {} if why_none else _pictures(beside)
    write_text(page, render_beside(beside, pictures, no_pictures=why_none))
    if why_none:
        warn(why_none)
    return beside


def _pictures(beside: StudiesBeside) -> dict[str, str]:
    from shardyard.report.study.beside_charts import beside_panels  # matplotlib: half a second

    return beside_panels(beside)


def render_beside(
    beside: StudiesBeside, pictures: Mapping[str, str], *, no_pictures: str = ""
) -> str:
    """The whole page.

    Args:
        pictures: SVG by name.
        no_pictures: Why there are none; empty where there are.
    """
    first = beside.name(0)
    head = (
        f'<header><p class="eyebrow">Scaling studies</p><h1>{len(beside.sides)} studies</h1>'
        f'<p class="lead">Held to the first: {esc(first)}.</p></header>'
    )
    figures = "".join(f'<figure id="{esc(name)}">{svg}</figure>' for name, svg in pictures.items())
    curves = (
        f'<div class="panels">{figures}</div>'
        if figures
        else f'<p class="muted">{esc(no_pictures)}</p>'
    )
    notes = "".join(f'<p class="note">{esc(text)}</p>' for text in how_words(beside))
    parts = [
        head,
        render_section("sizes", "Sizes", _card(sizes_table(beside)) + notes),
        render_section("curves", "Curves", curves),
        _settings(beside),
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    footer = f"Written {written} by <code>shardyard compare</code>, from table.json and the runs."
    return render_page(f"{first} and other studies, compared", "\n".join(parts), footer=footer)


def _settings(beside: StudiesBeside) -> str:
    heads, rows = settings_table(beside)
    if not beside.settings_of:
        body = '<p class="muted">No runs are there to read settings from.</p>'
    elif not rows:
        body = '<p class="muted">No setting differs.</p>'
    else:
        body = _card((heads, rows))
    note = f'<p class="note">Of the runs on {beside.base} accelerators, every default resolved.</p>'
    return render_section("settings", "What differs", body + note)


def _card(table: Table) -> str:
    heads, rows = table
    cells = [[esc(cell) for cell in row] for row in rows]
    return f'<div class="card">{render_table(heads, cells)}</div>'
