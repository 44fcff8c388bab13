"""The page and the Markdown of a study, from one value, and the folder that holds them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardyard import __version__
from shardyard.io.files import write_json, write_text
from shardyard.log import warn
from shardyard.planner.throughput import UNMEASURED
from shardyard.report.document import (
    Block,
    Chart,
    Details,
    Document,
    PageSection,
    Panels,
    Paragraph,
    Table,
    Text,
    Tiles,
    only_in,
)
from shardyard.report.html import charts_unavailable_reason, render_html
from shardyard.report.markdown import render_markdown
from shardyard.report.study.rows import ScalingSeries
from shardyard.report.study.scaling import series_notes, series_words
from shardyard.report.study.table import (
    SPEED,
    Column,
    columns_of,
    method_notes,
    percent_of,
    term_heads,
    term_rows,
    to_csv,
    to_json,
)
from shardyard.report.study.values import Values, values_of
from shardyard.units import ABSENT, format_count, format_percent, format_usd

_WORDS = {"how", "settings changed", "as printed"}
"""Heads of columns that hold words."""

_MOST_COLUMNS = 9
"""Columns that a page of 1,280 pixels holds without scrolling."""

PAGE, MARKDOWN, CSV, JSON = "study.html", "table.md", "table.csv", "table.json"


def render(
    name: str,
    series: Sequence[ScalingSeries],
    charts: Mapping[str, Mapping[str, str]],
    *,
    no_charts_reason: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        charts: Of each series by name, its panels as SVG.
        no_charts_reason: Why there are none; empty where there are.
        notes: What the study itself has to say: what it cost, what is still open.
    """
    return render_html(
        _document(name, series, charts, no_charts_reason=no_charts_reason, notes=notes)
    )


def to_markdown(name: str, series: Sequence[ScalingSeries], notes: Sequence[str] = ()) -> str:
    """Return tables and the remarks on them; curves are on the page."""
    return render_markdown(_document(name, series, {}, no_charts_reason="", notes=notes))


def _document(
    name: str,
    series: Sequence[ScalingSeries],
    charts: Mapping[str, Mapping[str, str]],
    *,
    no_charts_reason: str,
    notes: Sequence[str],
) -> Document:
    how = [Paragraph(text) for text in method_notes(series)]
    reason = Paragraph(no_charts_reason, kind="note", only=("page",))
    files = (
        "Curves: ", Text(PAGE, kind="file"), ". Numbers: ", Text(CSV, kind="file"), ", ",
        Text(JSON, kind="file"),
    )  # fmt: skip
    return Document(
        title=f"Study of {name}",
        kind="Shardyard scaling study",
        heading=name,
        head=[
            *(Paragraph(note, "lead") for note in notes),
            *([reason] if no_charts_reason else []),
        ],
        body=[
            *(
                _series(each, number, charts.get(each.name, {}), is_only=each.name == name)
                for number, each in enumerate(series)
            ),
            PageSection("how", "How to read it", how, only=("page",)),
            *only_in("markdown", *how, Paragraph(files)),
        ],
        footer=(f"Made by shardyard {__version__}, from {JSON}.",),
    )


def _series(
    series: ScalingSeries, number: int, panels: Mapping[str, str], *, is_only: bool
) -> PageSection:
    title = "Sizes" if is_only else series.name
    return PageSection(f"series-{number}", title, [*_blocks(series, number, panels)])


def _blocks(series: ScalingSeries, number: int, panels: Mapping[str, str]) -> Iterator[Block]:
    rows = values_of(series)
    columns = columns_of(rows)
    yield Paragraph(f"{series.kind}.", kind="note", only=("page",))
    yield from _tiles(rows)
    yield from only_in("markdown", _table(rows, columns))
    yield from only_in("page", *_page_tables(rows, columns))
    if panels:
        figures = [Chart(f"{name}-{number}", svg) for name, svg in panels.items()]
        yield Panels(figures)
    if words := series_words(series):
        yield Paragraph(words, only=("page",))
    if terms := term_rows(rows):
        table = Table(["step", *(f"#{head}" for head in term_heads(rows))], terms)
        yield Details("Seconds of a step, by term", [table], only=("page",))
        yield from only_in("markdown", Paragraph("Seconds of a step:"), table)
    yield from only_in("markdown", *(Paragraph(text, "item") for text in series_notes(series)))
    if series.source:
        yield Paragraph(f"Source: {series.source}", kind="note")


def _page_tables(rows: Sequence[Values], columns: Sequence[Column]) -> list[Table]:
    """One table where 1,280 pixels hold it, else two that both begin with the size."""
    if len(columns) <= _MOST_COLUMNS:
        return [_table(rows, columns)]
    size = [column for column in columns if column[1] in ("nodes", "accelerators", "origin")]
    speed = [column for column in columns if column[1] in SPEED]
    rest = [column for column in columns if column not in size and column not in speed]
    return [_table(rows, [*size, *speed]), _table(rows, [*size, *rest])]


def _table(rows: Sequence[Values], columns: Sequence[Column]) -> Table:
    heads = [head if head in _WORDS else f"#{head}" for head, _, _ in columns]
    return Table(heads, [[_cell(row, text(row)) for _, _, text in columns] for row in rows])


def _cell(row: Values, text: str) -> str:
    return Text(text, kind="bad") if row["origin"] == text == "failed" else text


def _tiles(rows: Sequence[Values]) -> Iterator[Tiles]:
    """The largest size that is known, in ten seconds."""
    shown = [row for row in rows if row["per_accelerator"] is not None]
    if not shown:
        return
    row = next((each for each in reversed(shown) if each["efficiency"] is not None), shown[-1])
    rate, unit = (row["tokens_per_s"], "tokens") if row["tokens_per_s"] else (
        row["samples_per_s"], "samples"
    )  # fmt: skip
    sizes = f"{row['nodes']} node{'' if row['nodes'] == 1 else 's'}, {row['origin']}"
    mark = UNMEASURED if row["unmeasured"] and row["origin"] == "predicted" else ""
    key = "efficiency" if row["efficiency"] is not None else "predicted_efficiency"
    tiles = [
        ("accelerators", str(row["accelerators"]), sizes),
        (
            f"{unit} per second",
            ABSENT if rate is None else f"{format_count(rate)}{mark}",
            "all accelerators",
        ),
        ("efficiency", _share(row[key]), f"{percent_of(row, key)} of the smallest size"),
    ]
    if row["usd_per_epoch"] is not None:
        hour = f"at {format_usd(row['usd_per_hour'])} an hour"
        tiles.append(("price of an epoch", f"{format_usd(row['usd_per_epoch'])}{mark}", hour))
    yield Tiles(tiles, only=("page",))


def _share(value: float | None) -> str:
    return ABSENT if value is None else format_percent(value)


# From rows to the folder of a study: table.md, table.csv, table.json and study.html.


def write_study(
    folder: Path, name: str, series: Sequence[ScalingSeries], notes: Sequence[str]
) -> None:
    """Write all four; each is replaced at once, so that a kill leaves the old ones whole.

    Raises:
        StorageError: The folder cannot be written.
    """
    write_json(folder / JSON, {**to_json(name, series), "notes": list(notes)})
    write_text(folder / CSV, to_csv(series))
    write_text(folder / MARKDOWN, to_markdown(name, series, notes))
    why_none = charts_unavailable_reason()
    pictures = {} if why_none else _render_charts(series)
    text = render(name, series, pictures, no_charts_reason=why_none, notes=notes)
    write_text(folder / PAGE, text)
    if why_none:
        warn(why_none)


def _render_charts(series: Sequence[ScalingSeries]) -> dict[str, dict[str, str]]:
    from shardyard.report.study.charts import panels  # matplotlib: half a second, not for a refusal

    return {each.name: panels(each, f"s{number}") for number, each in enumerate(series)}
