"""A dump of Wikipedia, ``pages-articles.xml`` or ``.xml.bz2``: the text of its articles.

An article is a page of namespace 0 that is no redirect; of several revisions the last counts. The
file is read as it comes, a page in memory at a time. Dumps are packed as one stream of bzip2 or
as many, where each can be entered: a span has the pages that begin in the streams that begin in it.

Source: https://www.mediawiki.org/wiki/Help:Export (the XML schema 0.11).
"""

import bz2
import html
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import BinaryIO
from xml.parsers import expat

from shardyard.data.byte_ranges import SourceFile, Span, TextSection, escape_text
from shardyard.data.readers.columns import TextOf
from shardyard.data.readers.json import decompression_errors, open_bz2
from shardyard.data.readers.read_errors import open_rewound
from shardyard.errors import SourceError

# Wikipedia's markup taken away: what is left is running text, in paragraphs.
#
# Left out are templates, tables, references, formulas, files, categories, comments, headings and
# lists, as WikiExtractor leaves them out; of a link its words stay. What is opened and never closed
# is taken for text. Read once from its beginning to its end: no text takes time with its square.
#
# mwparserfromhell gives the same texts at a tenth of the speed (0.97 MB/s, here 9.79), and 10,000
# unclosed <ref> take it over 20 s: benchmarks/results/cpu-2core/wiki-markup-20261129.json.
#
# Source: https://www.mediawiki.org/wiki/Help:Formatting and Help:Links.

_TOKEN = re.compile(
    r"(?P<comment><!--)|(?P<open>\{\{|\{\||\[\[)|(?P<close>\}\}|\|\}|\]\])|'{2,5}"
    r"|<(?P<end>/?)(?P<tag>[A-Za-z]{1,20})(?:\s[^<>]{0,2000}?)?(?P<alone>/?)>"
)
_CLOSED_BY = {"{{": "}}", "{|": "|}", "[[": "]]"}
_DROPPED_TAGS = frozenset(
    {
        "ref", "references", "math", "chem", "ce", "gallery", "timeline", "score", "imagemap",
        "syntaxhighlight", "source", "code", "pre", "hiero", "graph", "mapframe", "templatedata",
        "table", "noinclude", "poem",
    }
)  # fmt: skip
"""Tags that are dropped with their content; other tags leave their words."""
_BREAKS = frozenset({"br", "p", "div", "li", "td", "blockquote"})
"""Words before and behind them are two."""
_MOST_LINK = 5_000
"""Characters of a link or a file's caption; what is longer is no link."""
_OUTSIDE_LINK = re.compile(r"\[(?:https?:|ftp:)?//[^\s\[\]]++[^\S\n]*+([^\[\]\n]*+)\]")
_NO_CHARACTER = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{7,});?")
"""References to characters beyond Unicode, of any length."""
_SWITCH = re.compile(r"__[A-Z]+__")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*")
_NOT_PROSE = tuple("*#:;|!={}")
"""First characters of lines of lists, tables and headings."""


def plain_text(markup: str, namespaces: Collection[str] = ()) -> str:
    """Return an article's paragraphs, a blank line between any two; "" where there are none.

    Args:
        namespaces: Lower-case names, in the wiki's language, of namespaces of files, categories
            and others: links to them are left out.
    """
    text = _NO_CHARACTER.sub("\ufffd", _without_structures(markup, frozenset(namespaces)))
    text = html.unescape(text)
    text = _SWITCH.sub("", _OUTSIDE_LINK.sub(r"\1", text))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n\n".join(line for line in lines if line and not line.startswith(_NOT_PROSE))


def _without_structures(markup: str, namespaces: frozenset[str]) -> str:
    out: list[str] = []
    opened: list[tuple[str, int]] = []
    waiting: Counter[str] = Counter()
    place = 0
    while found := _TOKEN.search(markup, place):
        out.append(markup[place : found.start()])
        place = found.end()
        if found["comment"]:
            stop = markup.find("-->", place)
            place = len(markup) if stop < 0 else stop + 3
            continue
        closes, closed_by = _role(found)
        if closed_by:
            opened.append((closed_by, len(out)))
            waiting[closed_by] += 1
        elif closes and waiting[closes]:
            begin = _closed(opened, waiting, closes)
            inside = out[begin:]
            del out[begin:]
            if closes == "]]":
                out.append(_words_of_link(inside, namespaces))
        elif (found["tag"] or "").lower() in _BREAKS:
            out.append(" ")
    return "".join((*out, markup[place:]))


def _role(match: re.Match[str]) -> tuple[str, str]:
    """Return what a token closes, and what will close what it opens; "" if it does neither."""
    if match["open"]:
        return "", _CLOSED_BY[match["open"]]
    if match["close"]:
        return match["close"], ""
    tag = (match["tag"] or "").lower()
    if tag not in _DROPPED_TAGS or match["alone"]:
        return "", ""
    return (tag, "") if match["end"] else ("", tag)


def _closed(opened: list[tuple[str, int]], waiting: Counter[str], closes: str) -> int:
    """Return where the part that closes now began; forget unclosed parts within it."""
    while True:
        closed_by, begin = opened.pop()
        waiting[closed_by] -= 1
        if closed_by == closes:
            return begin


def _words_of_link(parts: list[str], namespaces: frozenset[str]) -> str:
    if sum(map(len, parts)) > _MOST_LINK:
        return ""
    target, _, label = (content := "".join(parts)).partition("|")
    space, colon, _ = target.partition(":")
    is_of_space = space.strip().lower() in namespaces
    if colon and (is_of_space or (not label and _LANGUAGE.fullmatch(space))):
        return ""
    return content.rpartition("|")[2].removeprefix(":") or target


_READ_BYTES = 2**18
_MOST_PAGE_CHARACTERS = 2**24
"""Most characters of one text; MediaWiki's own limit is 2 MiB (wgMaxArticleSize)."""
_HEAD_BYTES = 2**16
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
"""First bytes of a non-empty stream: https://en.wikipedia.org/wiki/Bzip2#File_format."""
_STREAM_BYTES = 10
_PAGE = b"<page>"
_NAMESPACE = re.compile(rb'<namespace key="(-?\d{1,9})"[^>]{0,200}>([^<]{1,200})</namespace>')
_KEPT = ("title", "ns", "text")
_USUAL_NAMESPACES = (b"File", b"Image", b"Category", b"Media", b"Special")


def read(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[TextSection]:
    """The articles of a dump that is not packed whose pages begin in the span.

    Raises:
        SourceError: It is no dump, is cut off, or its XML is broken.
    """
    names = _namespaces(open_rewound(file).read(_HEAD_BYTES))
    yield from _articles(_read_uncompressed(file, span), span.file, names, is_head=span.start == 0)


def read_bz2(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[TextSection]:
    """The articles of a packed dump that begin in the span.

    Raises:
        SourceError: As for ``read``, or it cannot be unpacked.
    """
    with decompression_errors(span.file):
        names = _namespaces(open_bz2(file).read(_HEAD_BYTES))
        chunks = _read_compressed(file, span)
        yield from _articles(chunks, span.file, names, is_head=span.start == 0)


def _namespaces(head: bytes) -> frozenset[str]:
    """Lower-case names of the namespaces whose links are no words of an article."""
    found = [name for key, name in _NAMESPACE.findall(head) if key != b"0"]
    return frozenset(name.decode(errors="replace").lower() for name in (*found, *_USUAL_NAMESPACES))


def _read_uncompressed(file: BinaryIO, span: Span) -> Iterator[tuple[bytes, bool]]:
    """From the beginning of the span to the end of the file, and what is behind the span."""
    file.seek(span.start)
    left = span.stop - span.start
    while chunk := file.read(min(left, _READ_BYTES) if left > 0 else _READ_BYTES):
        yield chunk, left <= 0
        left -= len(chunk)


def _read_compressed(file: BinaryIO, span: Span) -> Iterator[tuple[bytes, bool]]:
    """From the first stream of the span to the end of the file: what is in it, and whether its
    stream begins behind the span."""
    offset = 0 if span.start == 0 else _stream_behind(file, span)
    if offset is None:
        return
    file.seek(offset)
    packed, stream = b"", bz2.BZ2Decompressor()
    while True:
        if stream.eof:
            packed = stream.unused_data
            offset = file.tell() - len(packed)
            stream = bz2.BZ2Decompressor()
        if not packed and stream.needs_input:
            packed = file.read(_READ_BYTES)
            if not packed and file.tell() > offset:
                raise EOFError("it ends within a stream")
            if not packed:
                return
        yield stream.decompress(packed, max_length=4 * _READ_BYTES), offset >= span.stop
        packed = b""


def _stream_behind(file: BinaryIO, span: Span) -> int | None:
    """Return the start of the first stream that begins in the span; None if there is none."""
    file.seek(span.start)
    kept, begin = b"", span.start
    while begin < span.stop and (chunk := file.read(_READ_BYTES)):
        window = kept + chunk
        found = _STREAM.search(window)
        if found:
            offset = begin + found.start()
            return offset if offset < span.stop else None
        kept = window[1 - _STREAM_BYTES :]
        begin += len(window) - len(kept)
    return None


def _articles(
    chunks: Iterator[tuple[bytes, bool]], file: SourceFile, names: frozenset[str], *, is_head: bool
) -> Iterator[TextSection]:
    """Yield the articles whose pages begin before the first chunk that is behind the span.

    Args:
        is_head: Whether the first chunk is the beginning of the file; if not, content before
            the first page belongs to the preceding span.
    """
    pages = _Pages(file, is_head=is_head)
    window: bytes | None = None if is_head else b""
    for chunk, is_behind in chunks:
        if is_behind:
            pages.set_border(len(window or b""))
        if window is not None:
            window += chunk
            begin = window.find(_PAGE)
            if begin < 0:
                if is_behind and len(chunk) >= len(_PAGE):
                    return
                continue
            chunk, window = window[begin:], None
            pages.skip(begin)
        pages.feed(chunk)
        for markup in pages.take():
            text = plain_text(markup, names)
            if text:
                yield TextSection(text, begins=True, ends=True)
        if pages.is_over:
            return
    if window is None:
        pages.end()


class _Pages:
    """Hears the XML of a dump and keeps the articles until they are taken."""

    def __init__(self, file: SourceFile, *, is_head: bool) -> None:
        self.is_over = False
        """Whether a page has begun that belongs to the next span."""
        self._file = file
        self._is_head = is_head
        self._border: int | None = None
        self._fed = 0
        self._depth = 0
        self._last = ""
        self._page: dict[str, str] = {}
        self._parts: list[str] | None = None
        self._size = 0
        self._articles: list[str] = []
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._stop
        self._parser.CharacterDataHandler = self._on_text
        self._parser.StartDoctypeDeclHandler = self._reject_doctype
        if not is_head:
            self.feed(b"<mediawiki>")

    def set_border(self, waiting: int) -> None:
        """Pages from here on, behind so many bytes not fed yet, are the next span's."""
        if self._border is None:
            self._border = self._fed + waiting

    def skip(self, size: int) -> None:
        """Skip this many bytes before the border."""
        if self._border is not None:
            self._border -= size

    def feed(self, chunk: bytes) -> None:
        """Parse a further chunk.

        Raises:
            SourceError: The XML is broken or too large, or it is no dump.
        """
        self._fed += len(chunk)
        self._parse(chunk, is_end=False)
        if self._fed - self._parser.CurrentByteIndex > _MOST_PAGE_CHARACTERS and not self.is_over:
            raise self._error("one tag or comment of more than 16 MiB")

    def end(self) -> None:
        """End the input.

        Raises:
            SourceError: An element is still open.
        """
        self._parse(b"", is_end=True)

    def take(self) -> list[str]:
        """The markup of the articles since the last call."""
        taken, self._articles = self._articles, []
        return taken

    def _parse(self, chunk: bytes, *, is_end: bool) -> None:
        try:
            self._parser.Parse(chunk, is_end)
        except expat.ExpatError as error:
            why = expat.ErrorString(error.code)
            raise self._error(
                f"broken XML ({why})" if not is_end else f"cut off ({why})"
            ) from error

    def _error(self, what: str) -> SourceError:
        path = escape_text(self._file.path)
        place = f"{path}:{self._parser.CurrentLineNumber}" if self._is_head else path
        behind = f", behind the page {escape_text(self._last)!r}" if self._last else ""
        return SourceError(
            f"{place}{behind}: {what}. A dump of MediaWiki (pages-articles.xml) is read. Copy or "
            "fetch the file again, or take it out of data.source."
        )

    def _reject_doctype(self, *_: object) -> None:
        raise self._error("a document type, which no dump has")

    def _start(self, name: str, _attributes: object) -> None:
        self._depth += 1
        if self._depth == 1 and name != "mediawiki":
            raise self._error(f"no dump: it begins with <{escape_text(name[:40])}>")
        if name == "page":
            at = self._parser.CurrentByteIndex
            self.is_over = self.is_over or (self._border is not None and at >= self._border)
            self._page = {}
        elif name == "redirect":
            self._page[name] = ""
        elif name in _KEPT:
            self._parts, self._size = [], 0

    def _on_text(self, text: str) -> None:
        if self._parts is None:
            return
        self._parts.append(text)
        self._size += len(text)
        if self._size > _MOST_PAGE_CHARACTERS:
            raise self._error("a text of more than 16 Mi characters")

    def _stop(self, name: str) -> None:
        self._depth -= 1
        if name in _KEPT and self._parts is not None:
            self._page[name] = "".join(self._parts)
            self._parts = None
            self._last = self._page.get("title", self._last)
        elif name == "page" and not self.is_over:
            if self._page.get("ns") == "0" and "redirect" not in self._page:
                self._articles.append(self._page.get("text", ""))
            self._page = {}
