"""A file of plain text is one document, read in sections."""

import codecs
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from shardyard.data.byte_ranges import Span, TextSection
from shardyard.data.formats import SECTION_BYTES
from shardyard.data.readers.columns import TextOf
from shardyard.data.readers.read_errors import FileLocation, decode, open_rewound
from shardyard.errors import SourceError

_UTF8_CONTINUATION = bytes(range(0x80, 0xC0))


def read_text(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[TextSection]:
    """Sections of about ``SECTION_BYTES``, ended at line ends where there are any."""
    for start in range(span.start, span.stop, SECTION_BYTES):
        stop = min(start + SECTION_BYTES, span.stop)
        first_byte, end_byte = _section_border(file, start), _section_border(file, stop)
        file.seek(first_byte)
        content = file.read(end_byte - first_byte)
        if start == 0:
            content = content.removeprefix(codecs.BOM_UTF8)
        text = decode(content, FileLocation(span.file, lambda: open_rewound(file), first_byte))
        if text:
            yield TextSection(text, begins=start == 0, ends=span.is_last and stop == span.stop)


def _section_border(file: BinaryIO, offset: int) -> int:
    """Return the end of a section that should end at ``offset``.

    It is after the next line end, else after the next space, within the bytes of one section;
    else before the next character.
    """
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


# A text file that holds several documents, and ends a sentence with each line.
#
# Either as WikiExtractor writes them, between ``<doc ...>`` and ``</doc>``, or with blank lines
# between them: one sentence a line, as google-research/bert reads it, or a whole article on one, as
# NVIDIA's wikicorpus_en has it. The first line of the file says which. Lines come as paragraphs, a
# blank line apart, so that none of their sentences goes on in the next line.

MOST_DOCUMENT_BYTES = 2**24
"""Wikipedia's longest article is an eighth of that."""
_BLANK_BYTES = 4096
"""A longer line is none that is blank."""
_READ_BYTES = 2**20
_DOC, _END = b"<doc ", "</doc>"


def read_documents(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[TextSection]:
    """The documents whose first lines begin in the span.

    Raises:
        SourceError: It is no text in UTF-8, or a document is too long.
    """
    is_extracted = open_rewound(file).read(len(_DOC)) == _DOC
    lines: list[bytes] = []
    begin = size = 0
    follows_blank = _seek_line(file, span.start)
    while True:
        offset = file.tell()
        line = file.readline(MOST_DOCUMENT_BYTES + 1)
        is_blank = len(line) <= _BLANK_BYTES and not line.strip()
        starts = line.startswith(_DOC) if is_extracted else follows_blank and not is_blank
        if lines and (starts or not line or (is_blank and not is_extracted)):
            yield from _document(lines, FileLocation(span.file, partial(open_rewound, file), begin))
            lines, size = [], 0
        if not line or (starts and offset >= span.stop):
            return
        if starts:
            begin = offset
        if starts or lines:
            lines.append(line)
            size += len(line)
        if size > MOST_DOCUMENT_BYTES:
            raise SourceError(
                f"{FileLocation(span.file, partial(open_rewound, file), begin)}: a document of "
                "more than "
                f"{MOST_DOCUMENT_BYTES:,} bytes. Put blank lines between documents, or set "
                "data.format=sentences if each file is one document."
            )
        follows_blank = is_blank


def _seek_line(file: BinaryIO, start: int) -> bool:
    """Go to the first line that begins at ``start`` or behind; whether the one before is blank."""
    if start == 0:
        file.seek(0)
        return True
    file.seek(start - 1)
    while (part := file.readline(_READ_BYTES)) and not part.endswith(b"\n"):
        pass  # of a line that may be as long as the file
    begin = file.tell()
    back = max(0, begin - _BLANK_BYTES - 1)
    file.seek(back)
    before = file.read(begin - back)
    line_start = before.rfind(b"\n", 0, len(before) - 1) + 1
    is_whole = line_start > 0 or back == 0
    return is_whole and not before[line_start:].strip()


def _document(lines: list[bytes], location: FileLocation) -> Iterator[TextSection]:
    """The text of some lines, if there is any."""
    is_extracted = lines[0].startswith(_DOC)
    whole = decode(b"".join(lines), location).removeprefix("\ufeff").split("\n")
    own = [line.strip() for line in whole[1 if is_extracted else 0 :]]
    text = "\n\n".join(line for line in own if line and not (is_extracted and line == _END))
    if text:
        yield TextSection(text, begins=True, ends=True)
