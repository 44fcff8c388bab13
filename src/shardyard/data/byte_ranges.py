"""Units of reading: a file as it was when it was listed, a part of it, and its content."""

from dataclasses import dataclass, field
from typing import Literal

from shardyard.config.split_names import NamedSplit


@dataclass(frozen=True, slots=True)  # there may be millions
class SourceFile:
    """One file of a corpus as it was when it was listed."""

    path: str
    """Absolute path, or URL."""
    name: str
    """Path below the source that named it."""
    format: str
    """A key of ``formats.FORMATS``, or the suffix that a package reads."""
    size_bytes: int
    version: int | str
    """Changes with the content: time of change in nanoseconds, or an etag of elsewhere."""
    named: NamedSplit | None = None
    """Split that its name names, unless data.source names this very file; None: none."""
    split: Literal["train", "eval"] | None = None
    """Split that all of it is in; None: a hash of each section decides."""


@dataclass(frozen=True)
class Span:
    """The lines, or groups of rows, of a file that begin in bytes [start, stop)."""

    file: SourceFile
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the file ends here."""
        return self.stop == self.file.size_bytes


@dataclass(frozen=True)
class TextSection:
    """A document, or a part of a long one."""

    text: str
    begins: bool
    """Whether the document begins here; if not, it continues from the section before."""
    ends: bool
    location: object = field(default="", compare=False, repr=False)
    """Place of its row, for the message that ends the reading."""


def escape_text(text: str) -> str:
    """A file's own words in a message: what is no visible character is written as its escape."""
    return text if text.isprintable() else repr(text)[1:-1]
