"""Files with the suffix `.ltr`: text that is written backwards."""

from collections.abc import Iterator
from typing import BinaryIO

from shardyard.data.byte_ranges import Section, Span
from shardyard.data.formats import Format
from shardyard.data.readers.columns import TextOf


def read(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[Section]:
    """The whole file as one document."""
    yield Section(file.read(span.stop).decode()[::-1], begins=True, ends=True)


LTR = Format(suffixes=(".ltr",), code="letters.reader:read", has_keys=False, is_divisible=False)
