"""Documents as pages: one HTML file that opens from disk, without network and without script.

matplotlib draws the charts and comes with the extra ``plots``; pages without it have none.
"""

from collections.abc import Iterator, Sequence
from functools import cache
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
