"""Documents as pages: one HTML file that opens from disk, without network and without script.

matplotlib draws the charts and comes with the extra ``plots``; pages without it have none.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from shardyard.io.sanitize import sanitize
from shardyard.report.document import Block, Document, Head, Table, Text, shown

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "templates"
CSS = (TEMPLATES / "tokens.css").read_text() + (TEMPLATES / "page.css").read_text()
"""Style sheet of all pages: light and dark, wide and narrow."""

_IN_CARDS = {"paragraph", "table", "sharebar", "copycommand", "listing"}


def render_html(document: Document) -> str:
    """Return a whole file."""
    return _template().render(it=document, css=CSS).lstrip()


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # longer than a short plan
    from markupsafe import Markup

    def sanitized(value: object) -> object:
        return value if isinstance(value, Markup) else sanitize(str(value))

    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=sanitized,
    )  # fmt: skip
    found.filters["markup"] = Markup
    found.globals |= {
        "as_text": lambda cell: cell if isinstance(cell, Text) else Text(cell),
        "cards": _cards,
        "layout": _layout,
        "shown": lambda blocks: shown(blocks, "page"),
    }
    return found.get_template("document.html")


def _cards(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Cut a section into stretches, each with whether a card is around it.

    A stretch of only words has none.
    """
    for in_card, stretch in groupby(shown(blocks, "page"), lambda each: each.type in _IN_CARDS):
        found = list(stretch)
        yield in_card and any(each.type != "paragraph" for each in found), found


def _layout(table: Table) -> tuple[list[Head], list[list[str]], list[str], list[list[str] | None]]:
    """Return heads, cells, class of each column, and the order of the rows by each column.

    An order is a declaration of a style for each row; None: it does not sort.
    """
    heads, rows = table.for_medium("page")
    kinds = ["n" if head.is_number else "w" for head in heads]
    kinds[0] = "n" if heads[0].is_number else "k"
    if not heads[-1].text:
        kinds[-1] = "t"
    orders: list[list[str] | None] = [None] * len(heads)
    if table.is_sortable:
        orders = [_order(place, head, rows) for place, head in enumerate(heads)]
    return heads, rows, kinds, orders


def _order(place: int, head: Head, rows: Sequence[Sequence[str]]) -> list[str] | None:
    """Rank the rows by a column of numbers; by the first one they stay as they are."""
    if place and not head.is_number:
        return None
    keys = [_key(row[place]) if place else float(n) for n, row in enumerate(rows)]
    ranks = {
        number: rank for rank, number in enumerate(sorted(range(len(rows)), key=keys.__getitem__))
    }
    return [f"--s{place + 1}:{ranks[number]};" for number in range(len(rows))]


def _key(cell: str) -> float:
    order = cell.order if isinstance(cell, Text) else None
    return float("inf") if order is None else order


def charts_unavailable_reason() -> str:
    """Why a page can have no pictures, and what to install; empty where they can be drawn."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        return (
            f"matplotlib is not installed ({error}), so the page has no pictures. Install it: "
            "pip install 'shardyard[plots]'"
        )
    return ""


# --- markup of pages that are no documents yet ----


def esc(text: object) -> str:
    """Text as HTML shows it, in an element or an attribute; all that came from outside needs it."""
    return escape(sanitize(str(text)), quote=True)


def render_page(title: str, body: str, *, footer: str, css: str = "") -> str:
    """Return a whole file that opens from disk, without network and without script.

    Args:
        title: Plain text.
        body: HTML.
        footer: HTML.
        css: Rules for only this page.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(title)}</title>
<style>{CSS}{css}</style>
</head>
<body>
<main>
{body}
<footer>{footer}</footer>
</main>
</body>
</html>
"""


def render_section(name: str, title: str, body: str) -> str:
    """A part of the page under a heading, with an id to link to."""
    return f'<section id="{name}-section"><h2>{title}</h2>\n{body}</section>'


def render_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    totals: int = 0,
    is_folding: bool = False,
) -> str:
    """Return a table of escaped cells; a head that begins with # is a column of numbers.

    Args:
        heads: Plain text; an empty last one is above reasons. With no text in any, no heads.
        totals: Number of last rows that are sums.
        is_folding: Whether a row becomes a paragraph on a phone; its cells must be clear without
            the heads.
    """
    kinds = ["n" if head.startswith("#") else "w" for head in heads]
    kinds[0] = "n" if kinds[0] == "n" else "k"
    if not heads[-1]:
        kinds[-1] = "t"
    names = [text.removeprefix("#") for text in heads]
    head = "".join(
        f'<th class="{kind}">{esc(name)}</th>' if name else f'<td class="{kind}"></td>'
        for kind, name in zip(kinds, names, strict=True)
    )
    lines = list(rows)
    starts = ["<tr>"] * (len(lines) - totals) + ['<tr class="total">'] * totals
    body = "".join(
        start
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for start, row in zip(starts, lines, strict=True)
    )
    top = f"<thead><tr>{head}</tr></thead>" if any(text.strip("#") for text in heads) else ""
    kind = ' class="folds"' if is_folding else ""
    table = f"<table{kind}>{top}<tbody>{body}</tbody></table>"
    return scrolling(table, ", ".join(filter(None, names)))


def scrolling(table: str, name: str) -> str:
    """Return a table that scrolls inside itself, also by keys.

    Args:
        name: Name for screen readers.
    """
    label = esc(f"Table: {name}" if name else "Table")
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{table}</div>'


def render_tiles(tiles: Iterable[tuple[str, str, str]], *, style: str = "") -> str:
    """Return tiles in a row: label, value and a line below, as text."""
    cells = "".join(
        f'<div class="tile"><div class="label">{esc(label)}</div>'
        f'<div class="value">{esc(value)}</div><div class="sub">{esc(below)}</div></div>'
        for label, value, below in tiles
    )
    attribute = f' style="{style}"' if style else ""
    return f'<div class="tiles"{attribute}>{cells}</div>'


def swatch(variable: str, *, is_tick: bool = False) -> str:
    """A spot of a colour of the style sheet (``--blue``: ``blue``), or an upright tick of it."""
    kind = "swatch tick" if is_tick else "swatch"
    return f'<span class="{kind}" style="background:var(--{variable})"></span>'


def render_markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown; heads and cells are text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(escape_markdown(cell) for cell in line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    """Text that Markdown neither splits nor takes for markup."""
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", text).replace("\n", " ")
