"""A file of plain text is one document, read in sections."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from shardyard.data.byte_ranges import Section, Span
from shardyard.data.formats import SECTION_BYTES
from shardyard.data.readers.read_errors import Place, decode, rewound
from shardyard.data.readers.rows import TextOf

_UTF8_CONTINUATION = bytes(range(0x80, 0xC0))


def read_text(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[Section]:
    """Sections of about ``SECTION_BYTES``, ended at line ends where there are any."""
    for start in range(span.start, span.stop, SECTION_BYTES):
        stop = min(start + SECTION_BYTES, span.stop)
        first_byte, end_byte = _section_border(file, start), _section_border(file, stop)
        file.seek(first_byte)
        content = file.read(end_byte - first_byte)
        if start == 0:
            content = content.removeprefix(codecs.BOM_UTF8)
        text = decode(content, Place(span.file, lambda: rewound(file), first_byte))
        if text:
            yield Section(text, begins=start == 0, ends=span.is_last and stop == span.stop)


def _section_border(file: BinaryIO, offset: int) -> int:
    """Where a section that should end at ``offset`` ends: after the next line end, else space,
    within the bytes of one section, else before the next character."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    window = file.read(SECTION_BYTES)
    for separator in (b"\n", b" "):
        found = window.find(separator)
        if found >= 0:
            return offset + found
    rest = window[1:]
    return offset + len(rest) - len(rest.lstrip(_UTF8_CONTINUATION))
