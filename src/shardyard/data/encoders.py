"""From a document to the ids of its tokens, and to what stands beside them.

A row of ``config/data_formats.py`` names an encoder. What it puts beside the ids is kept in shards
as a column of its own, and reaches a task that names it as a field of its micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from shardyard.data.byte_ranges import Section
from shardyard.data.tokenizer import TextEncoder

LEARNT = "learnt"
"""The column that says of each token whether it is learnt (1) or only read (0)."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One whole number for each token."""

    dtype: str
    """As numpy writes it, little-endian: ``|u1``, ``<u2``, ``<i4``."""
    begin: int
    """Of the token that begins a document, where there is one."""
    end: int
    """Of the token that ends it."""


@dataclass(frozen=True)
class Encoded:
    """A document, or a section of one."""

    ids: list[int]
    columns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of each of the encoder's columns as many numbers as there are ids."""
    is_whole: bool = False
    """Whether it is a document of its own, with the tokens that begin and end it."""


class Encoder(Protocol):
    """What is made of a document; equal text gives equal numbers."""

    columns: ClassVar[Mapping[str, Column]]

    def __init__(self, tokenizer: TextEncoder, **options: str) -> None:
        """Args:
        options: Settings of ``data`` that the row of ``data.format`` gives it.
        """

    def encode(self, section: Section) -> list[Encoded]:
        """The section, or the documents that it is learnt as.

        Raises:
            SourceError: It cannot be learnt; names its place.
        """

    @staticmethod
    def words(section: Section) -> str:
        """What a tokenizer is trained on."""


class PlainText:
    """Every token counts alike."""

    columns: ClassVar[Mapping[str, Column]] = {}

    def __init__(self, tokenizer: TextEncoder) -> None:
        self.tokenizer = tokenizer

    def encode(self, section: Section) -> list[Encoded]:
        return [Encoded(self.tokenizer.encode(section.text))]

    @staticmethod
    def words(section: Section) -> str:
        return section.text
