"""Files with the suffix `.ltr`: text that is written backwards."""

from collections.abc import Iterator
from typing import BinaryIO

from shardyard.data.byte_ranges import Span, TextSection
from shardyard.data.formats import Format
from shardyard.data.readers.columns import TextOf


def read(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[TextSection]:
    """The whole file as one document."""
    yield TextSection(file.read(span.stop).decode()[::-1], begins=True, ends=True)


LTR = Format(suffixes=(".ltr",), code="letters.reader:read", has_keys=False, is_divisible=False)
