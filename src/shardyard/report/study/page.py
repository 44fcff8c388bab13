"""The page of a study: one file that opens from disk, in the style of the other pages."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardyard import __version__
from shardyard.io.files import write_json, write_text
from shardyard.log import warn
from shardyard.planner.throughput import UNMEASURED
from shardyard.report.html import (
    charts_unavailable_reason,
    esc,
    render_page,
    render_section,
    render_table,
    render_tiles,
)
from shardyard.report.study.rows import ScalingSeries
from shardyard.report.study.scaling import series_notes
from shardyard.report.study.table import (
    columns_of,
    method_notes,
    percent_of,
    term_heads,
    term_rows,
    to_csv,
    to_json,
    to_markdown,
)
from shardyard.report.study.values import Values, values_of
from shardyard.units import ABSENT, format_count, format_percent, format_usd

_WORDS = {"how", "settings changed", "as printed"}
"""Heads of columns that hold words."""


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
    head = (
        f'<header><div class="eyebrow">Shardyard scaling study</div><h1>{esc(name)}</h1>'
        + "".join(f'<p class="lead">{esc(note)}</p>' for note in notes)
        + "</header>"
    )
    if no_charts_reason:
        head += f'<p class="note">{esc(no_charts_reason)}</p>'
    body = head + "".join(
        _series(each, number, charts.get(each.name, {})) for number, each in enumerate(series)
    )
    how = "".join(f'<p class="note">{esc(text)}</p>' for text in method_notes(series))
    body += render_section("how", "How to read it", how)
    return render_page(
        f"Study of {name}", body, footer=f"Made by shardyard {esc(__version__)}, from table.json."
    )


def _series(series: ScalingSeries, number: int, panels: Mapping[str, str]) -> str:
    rows = values_of(series)
    columns = columns_of(rows)
    heads = [head if head in _WORDS else f"#{head}" for head, _, _ in columns]
    cells = [[_cell(row, text(row)) for _, _, text in columns] for row in rows]
    figures = "".join(
        f'<figure id="{esc(name)}-{number}">{svg}</figure>' for name, svg in panels.items()
    )
    parts = [
        f'<p class="note">{esc(series.kind)}.</p>',
        _tiles(rows),
        f'<div class="card">{render_table(heads, cells)}</div>',
        f'<div class="panels" style="margin-top:12px">{figures}</div>' if figures else "",
        _notes(series),
        _terms(rows),
        f'<p class="note">Source: {esc(series.source)}</p>' if series.source else "",
    ]
    return render_section(f"series-{number}", esc(series.name), "".join(parts))


def _cell(row: Values, text: str) -> str:
    kind = ' class="bad"' if row["origin"] == "failed" and text == "failed" else ""
    return f"<span{kind}>{esc(text)}</span>" if kind else esc(text)


def _tiles(rows: Sequence[Values]) -> str:
    """The largest size that is known, in ten seconds."""
    shown = [row for row in rows if row["per_accelerator"] is not None]
    if not shown:
        return ""
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
        ("efficiency", _share(row[key]), percent_of(row, key)),
    ]
    if row["usd_per_epoch"] is not None:
        hour = f"at {format_usd(row['usd_per_hour'])} an hour"
        tiles.append(("price of an epoch", f"{format_usd(row['usd_per_epoch'])}{mark}", hour))
    return render_tiles(tiles, style="margin-bottom:12px")


def _share(value: float | None) -> str:
    return ABSENT if value is None else format_percent(value)


def _notes(series: ScalingSeries) -> str:
    said = series_notes(series)[1:]  # the first is its kind, which stands above
    if not said:
        return ""
    items = "".join(f"<p>{esc(text)}</p>" for text in said)
    return f'<div class="card" style="margin-top:12px">{items}</div>'


def _terms(rows: Sequence[Values]) -> str:
    lines = term_rows(rows)
    if not lines:
        return ""
    heads = ["step", *(f"#{head}" for head in term_heads(rows))]
    table = render_table(heads, [[esc(cell) for cell in line] for line in lines])
    return (
        '<details style="margin-top:12px"><summary>Seconds of a step, by term</summary>'
        f"<div>{table}</div></details>"
    )


# From rows to the folder of a study: table.md, table.csv, table.json and study.html.

PAGE, MARKDOWN, CSV, JSON = "study.html", "table.md", "table.csv", "table.json"


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
