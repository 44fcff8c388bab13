"""Print a table: drawn by rich on a terminal, aligned columns elsewhere."""

import sys
from collections.abc import Sequence

from shardyard.io.sanitize import sanitize
from shardyard.io.terminal import echo


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print rows under column names; the last column may be long."""
    rows = [[sanitize(cell) for cell in row] for row in rows]
    if sys.stdout is not None and sys.stdout.isatty():
        _draw(columns, rows, title=title)
        return
    if title:
        echo(title)
    for line in _aligned([columns, *rows] if any(columns) else rows):
        echo(f"  {line}" if title else line)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=any(columns),
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for place, name in enumerate(columns):
        # Names and values stay whole; what is long, a sentence, folds in the last column.
        table.add_column(name, overflow="fold", no_wrap=place == 0)
    for row in rows:
        *first, last = [Text(cell) for cell in row]
        last.stylize("dim")
        table.add_row(*first, last)
    Console(highlight=False).print(table)
