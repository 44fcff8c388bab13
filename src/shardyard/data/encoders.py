"""From a document to the ids of its tokens, and to what stands beside them.

A row of ``config/data_formats.py`` names an encoder. What it puts beside the ids is kept in shards
as a column of its own, and reaches a task that names it as a field of its micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from shardyard.data.tokenizer import TextEncoder


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


class Encoder(Protocol):
    """What is made of a document; equal text gives equal numbers."""

    columns: ClassVar[Mapping[str, Column]]

    def encode(self, text: str, tokenizer: TextEncoder) -> Encoded:
        """Without the tokens that begin and end the document."""


class PlainText:
    """Every token counts alike."""

    columns: ClassVar[Mapping[str, Column]] = {}

    def encode(self, text: str, tokenizer: TextEncoder) -> Encoded:
        return Encoded(tokenizer.encode(text))
