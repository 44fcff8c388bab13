"""Documents in the terminal: words, tables and commands, without charts."""

import shutil
import sys
from collections.abc import Callable, Iterable
from textwrap import fill

from shardyard.io.terminal import echo, print_table
from shardyard.report.document import (
    Block,
    Callout,
    CopyCommand,
    PageSection,
    Paragraph,
    Table,
    Tiles,
    shown,
)


def show(blocks: Iterable[Block], *, title: str = "", write: Callable[[str], None] = echo) -> None:
    """Print blocks; a section begins with an empty line, and so does a table after words.

    Args:
        title: Head of the first column of a table that comes first, above it where it has one.
        write: Prints the lines that are no table.
    """
    before: Block | None = None
    for block in shown(blocks, "terminal"):
        is_table = isinstance(block, Table | Tiles)
        if isinstance(block, PageSection) or (before and (is_table or isinstance(block, Callout))):
            write("")
        match block:
            case PageSection():
                show(block.blocks, title=block.title, write=write)
            case Paragraph():
                _show_words(block.text, write)
            case Callout() | CopyCommand():
                words = block.text if isinstance(block, Callout) else block.purpose
                if words:
                    _show_words(words, write)
                if block.command:
                    write(f"  {block.command}")
            case Tiles():
                print_table(("result", "", ""), block.rows)
            case Table():
                heads, rows = block.for_medium("terminal")
                names = [head.text for head in heads]
                named = title if before is None else ""
                above = named if names[0] else ""
                print_table((names[0] or named, *names[1:]), rows, title=above)
        before = block


def _show_words(text: str, write: Callable[[str], None]) -> None:
    """A paragraph, folded between words where a terminal would break them."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = fill(text, shutil.get_terminal_size().columns, break_on_hyphens=False)
    write(text)
