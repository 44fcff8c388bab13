"""A document as one value: what a page, a Markdown file and the terminal show of the same numbers.

Builders (plan, report, comparison, study, drill) make blocks out of plain text and never write
markup. ``html.py``, ``markdown.py`` and ``terminal.py`` render them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

Medium = Literal["page", "markdown", "terminal"]


class Text(str):
    """Text of a cell, with what a page shows in addition; other media print only the text."""

    source: str
    """Source of a number, shown under the pointer and on keyboard focus."""
    kind: str
    """``code``, ``copy`` (code to copy), ``good``, ``bad``, ``muted``, ``prompt`` or ``badge X``.
    """
    colour: str
    """Variable of the style sheet for a spot before the text; empty: none."""
    order: float | None
    """Place in a table sorted by this column; None: last."""
    shares: "tuple[BarPart, ...]"
    """Parts of a bar that is drawn in place of the text."""

    def __new__(
        cls,
        text: object,
        *,
        source: str = "",
        kind: str = "",
        colour: str = "",
        order: float | None = None,
        shares: "tuple[BarPart, ...]" = (),
    ) -> "Text":
        """Make a text; only the text takes part in comparisons."""
        made = super().__new__(cls, text)
        made.source, made.kind, made.colour = source, kind, colour
        made.order, made.shares = order, shares
        return made


def code(text: object) -> Text:
    """Return text in the font of code."""
    return Text(text, kind="code")


@dataclass(frozen=True)
class BarPart:
    """A part of a bar."""

    name: str
    width: float
    """BarPart of the whole bar, 0 to 1."""
    colour: str
    """Class of the style sheet."""
    words: str
    """Its size, with its unit."""


@dataclass(frozen=True)
class _Block:
    only: tuple[Medium, ...] = field(default=(), kw_only=True)
    """Media that show it; empty: all of them."""

    @property
    def type(self) -> str:
        """Name of the block in the page's template."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Paragraph(_Block):
    """Text, in one part or several; ``kind`` is lead, note, muted or bad."""

    parts: str | tuple[str, ...]
    kind: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return self.parts if isinstance(self.parts, str) else "".join(self.parts)

    @property
    def runs(self) -> tuple[str, ...]:
        """Its parts, of which each may be code or a link."""
        return (self.parts,) if isinstance(self.parts, str) else self.parts


@dataclass(frozen=True)
class Callout(_Block):
    """The one thing to read, and what to paste."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Tiles(_Block):
    """Numbers side by side: label, value and a line below."""

    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Head:
    """Head of a column, written with marks: ``#`` numbers, ``+`` pages only, ``-`` no page."""

    text: str
    is_number: bool
    only: tuple[Medium, ...]

    @classmethod
    def of(cls, written: str) -> "Head":
        """Read the marks."""
        only: tuple[Medium, ...] = ()
        if written[:1] in ("+", "-"):
            only = ("page",) if written[0] == "+" else ("markdown", "terminal")
            written = written[1:]
        return cls(written.removeprefix("#"), written.startswith("#"), only)


@dataclass(frozen=True)
class Table(_Block):
    """Rows under heads; see ``Head`` for the marks. An empty last head is above reasons."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: int = 0
    """Number of last rows that are sums."""
    is_folding: bool = False
    """Whether a row becomes a paragraph on a phone; cells must then be clear without heads."""
    is_sortable: bool = False
    """Whether a reader can choose the column of numbers that sorts the rows, the least first."""
    name: str = ""
    """Name of a sortable table, unique on its page."""

    def for_medium(self, medium: Medium) -> "tuple[list[Head], list[list[str]]]":
        """Return the heads and cells that a medium shows."""
        heads = [Head.of(written) for written in self.heads]
        kept = [place for place, head in enumerate(heads) if not head.only or medium in head.only]
        return [heads[n] for n in kept], [[row[n] for n in kept] for row in self.rows]


@dataclass(frozen=True)
class Chart(_Block):
    """A chart as SVG, with its legend in rows, each under a word."""

    name: str
    svg: str
    keys: tuple[tuple[str, tuple[Text | str, ...]], ...] = ()
    is_wide: bool = False


@dataclass(frozen=True)
class Panels(_Block):
    """Charts side by side."""

    figures: Sequence[Chart]
    name: str = ""


@dataclass(frozen=True)
class ShareBar(_Block):
    """A whole cut into parts, with words above and a legend below."""

    text: str
    shares: tuple[BarPart, ...]
    has_keys: bool = False


@dataclass(frozen=True)
class Details(_Block):
    """Blocks that a page folds away under a line."""

    summary: str
    blocks: "Sequence[Block]"
    is_open: bool = False


@dataclass(frozen=True)
class CopyCommand(_Block):
    """Something to paste, and what for."""

    command: str
    purpose: str = ""


@dataclass(frozen=True)
class Listing(_Block):
    """Text as it is, with its line breaks."""

    parts: str | tuple[str, ...]

    @property
    def runs(self) -> tuple[str, ...]:
        """Its parts."""
        return (self.parts,) if isinstance(self.parts, str) else self.parts


@dataclass(frozen=True)
class Pictures(_Block):
    """Small JPEG images in base64, each with a caption of several texts."""

    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class Choice(_Block):
    """Charts by option, of which a reader chooses one, and curves that can be hidden."""

    options: Mapping[str, Sequence[Chart]]
    toggles: Sequence[tuple[int, str, str]]
    """Number, swatch as SVG, and name of each group of curves."""


@dataclass(frozen=True)
class PageSection(_Block):
    """Blocks under a heading."""

    name: str
    title: str
    blocks: "Sequence[Block]"


Block = (
    Paragraph | Callout | Tiles | Table | Chart | Panels | ShareBar | Details | CopyCommand
    | Listing | Pictures | Choice | PageSection
)  # fmt: skip
AnyBlock = TypeVar("AnyBlock", bound=_Block)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole page."""

    title: str
    """In the browser's tab."""
    kind: str
    """Kind of document, above the heading."""
    heading: str
    badge: str = ""
    badge_kind: str = ""
    """Class of the badge."""
    head: Sequence[Block]
    """Blocks under the heading, before the first section."""
    body: Sequence[Block]
    footer: tuple[str, ...]


def shown(blocks: Iterable[AnyBlock], medium: Medium) -> Iterator[AnyBlock]:
    """Yield the blocks that a medium shows."""
    return (block for block in blocks if not block.only or medium in block.only)


def only_in(medium: Medium, *blocks: Any) -> list[Any]:
    """Return the blocks, for one medium only."""
    return [replace(block, only=(medium,)) for block in blocks]
