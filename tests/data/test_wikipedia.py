"""Dumps of Wikipedia: which pages are articles, their text, and how a broken one is told."""

import bz2
import random
import time
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from shardyard.data.byte_ranges import SourceFile, Span
from shardyard.data.formats import SECTION_BYTES, format_of
from shardyard.data.readers import wikipedia
from shardyard.data.readers.columns import TextOf
from shardyard.data.readers.wikipedia import plain_text
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.errors import SourceError

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">
  <siteinfo><sitename>Wikipedia</sitename><namespaces>
    <namespace key="0" case="first-letter" />
    <namespace key="6" case="first-letter">Datei</namespace>
    <namespace key="14" case="first-letter">Kategorie</namespace></namespaces></siteinfo>
"""
TAIL = "</mediawiki>\n"


def page(title: str, text: str, *, ns: int = 0, more: str = "") -> str:
    return (
        f"  <page>\n    <title>{escape(title)}</title><ns>{ns}</ns><id>1</id>{more}\n"
        f"    <revision><id>2</id><timestamp>2026-01-01T00:00:00Z</timestamp>"
        f'<text bytes="1" xml:space="preserve">{escape(text)}</text></revision>\n  </page>\n'
    )


PAGES = [
    page("A", "'''A''' is a [[letter|Letter]].\n\nIt comes first. [[Kategorie:Letters]]"),
    page("Talk:A", "No article.", ns=1),
    page("Alpha", "#REDIRECT [[A]]", more='<redirect title="A" />'),
    page("Empty", "{{stub}}"),
    page("B & <C>", "B &amp; C are é \U0001f600 {{cite|x={{y}}}}letters.<ref name=x>No.</ref>"),
]
TEXTS = ["A is a Letter.\n\nIt comes first.", "B & C are é \U0001f600 letters."]
DUMP = (HEAD + "".join(PAGES) + TAIL).encode()
MANY = [f"Page {number} is here. {'It says so. ' * (number % 50)}".strip() for number in range(400)]


def texts_of(path: Path, piece_bytes: int = SECTION_BYTES) -> list[str]:
    pieces = split_into_pieces(list_files(str(path)), piece_bytes)
    return [section.text for piece in pieces for section in read_sections(piece, TextOf("text"))]


def in_streams(content: bytes, size: int) -> bytes:
    """Packed as some packers do: a stream for each so many bytes, wherever that is."""
    return b"".join(
        bz2.compress(content[begin : begin + size]) for begin in range(0, len(content), size)
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dump.xml", DUMP),
        ("dump.xml.bz2", bz2.compress(DUMP)),
        ("Dump.XML.BZ2", in_streams(DUMP, 100)),
        ("enwiki-pages-articles1.xml-p1p41242.bz2", bz2.compress(DUMP)),
    ],
)
def test_articles_are_pages_of_their_namespace_without_redirects(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path / name) == TEXTS
    assert format_of("notes.bz2", "by_suffix") is None


def test_of_several_revisions_the_last_counts(tmp_path: Path) -> None:
    twice = page("A", "Old.").replace(
        "</revision>", "</revision><revision><text>New.</text></revision>"
    )
    (tmp_path / "x.xml").write_text(HEAD + twice + TAIL)
    assert texts_of(tmp_path / "x.xml") == ["New."]


@pytest.mark.parametrize("size", [37, 64, 1000, 100_000])
def test_each_span_of_a_packed_dump_has_its_own_pages(size: int, tmp_path: Path) -> None:
    """Streams end within pages, and within the very tags that begin them."""
    content = (HEAD + "".join(page(str(n), text) for n, text in enumerate(MANY)) + TAIL).encode()
    if size < 1000:
        content = content[: content.index(b"<title>20<")].rpartition(b"<page>")[0] + TAIL.encode()
    expected = MANY[:20] if size < 1000 else MANY
    path = tmp_path / "x.xml.bz2"
    path.write_bytes(in_streams(content, size))
    whole = path.stat().st_size
    file = SourceFile(str(path), path.name, "wikipedia_bz2", whole, 0)
    for step in (whole, whole // 3 + 1, whole // 17 + 1):
        with path.open("rb") as opened:
            texts = [
                section.text
                for start in range(0, whole, step)
                for section in wikipedia.read_bz2(
                    opened, Span(file, start, min(start + step, whole)), TextOf()
                )
            ]
        assert texts == expected


def test_each_span_of_a_plain_dump_has_its_own_pages(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_bytes(DUMP)
    file = SourceFile(str(path), path.name, "wikipedia", len(DUMP), 0)
    with path.open("rb") as opened:
        for step in (5, 7, 64, 331, *range(600, len(DUMP), 23)):
            texts = [
                section.text
                for start in range(0, len(DUMP), step)
                for section in wikipedia.read(
                    opened, Span(file, start, min(start + step, len(DUMP))), TextOf()
                )
            ]
            assert texts == TEXTS, step


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (DUMP[:-20], r"behind the page 'B & <C>': cut off \(unclosed token\)"),
        (DUMP[: DUMP.index(b"letters.")], r"x\.xml:\d+.* cut off"),
        (DUMP.replace(b"</title><ns>1", b"</titel><ns>1"), r"x\.xml:\d+, behind.*mismatched tag"),
        (DUMP.replace(b"\xc3\xa9", b"\xe9"), r"x\.xml:\d+, .*not well-formed"),
        (b"<rss><item/></rss>", "no dump: it begins with <rss>"),
        (b"no xml at all", "broken XML"),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><mediawiki/>', "a document type"),
        (b"", "empty corpus"),
    ],
)
def test_a_broken_dump_is_told_with_its_place(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_bytes(content)
    with pytest.raises(SourceError, match=why):
        texts_of(tmp_path / "x.xml")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (bz2.compress(DUMP)[:-7], r"cannot be unpacked: .*ended before"),
        (bz2.compress(DUMP)[:100] + bytes(100) + bz2.compress(DUMP)[200:], "cannot be unpacked"),
        (DUMP, "cannot be unpacked: Invalid data stream"),
        (bz2.compress(DUMP[:-20]), "cut off"),
    ],
)
def test_a_packed_dump_that_is_damaged_is_told(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.xml.bz2").write_bytes(content)
    with pytest.raises(SourceError, match=rf"x\.xml\.bz2.*{why}"):
        texts_of(tmp_path / "x.xml.bz2")


def test_what_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wikipedia, "_MOST_PAGE_CHARACTERS", 10_000)
    monkeypatch.setattr(wikipedia, "_READ_BYTES", 1000)
    path = tmp_path / "x.xml"
    path.write_text(HEAD + page("Long", "x " * 8000) + TAIL)
    with pytest.raises(SourceError, match=r"x\.xml:\d+, behind the page 'Long': a text of more"):
        texts_of(path)
    path.write_text(HEAD + page("A", "a.") + "<!-- " + "x" * 30_000 + TAIL)
    with pytest.raises(SourceError, match="one tag or comment of more"):
        texts_of(path)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and ''italic''.", "Bold and italic."),
        ("A [[link]], a [[target|word]] and [[:de:Wort]].", "A link, a word and de:Wort."),
        ("[[Datei:x.jpg|thumb|A [[link]] in it]]Text.", "Text."),
        ("Text.\n[[Category:X]]\n[[de:Seite]]", "Text."),
        ("{{Infobox|a={{b|c}}|d=[[e]]}}Text{{r|1}}.", "Text."),
        ('{| class="x"\n|-\n| cell {{a}}\n|}\nText.', "Text."),
        ('One<ref name="a">No [[x]]</ref> two<ref name="a" />.<br>Four', "One two. Four"),
        ("x<math>a_{b}</math>y <!-- no --> <small>z</small>", "xy z"),
        ("== Head ==\n* item\n# item\n: in\nText &amp; [http://x.y a label].\n__TOC__",
         "Text & a label."),
        ("One.\nTwo.\n\nThree.", "One.\n\nTwo.\n\nThree."),
        ("{{ open and [[never closed", "open and never closed"),
        ("closed }} and ]] never opened </ref>", "closed and never opened"),
        ("[[a {{b]] c", "a b c"),
        ("<!-- open", ""),
    ],
)  # fmt: skip
def test_markup_is_taken_away(markup: str, text: str) -> None:
    assert " ".join(plain_text(markup, {"datei", "category"}).split(" ")) == text


@pytest.mark.heavy
@pytest.mark.parametrize(
    "part",
    [
        "{{",
        "[[",
        "[[a ",
        "}}",
        "<ref>",
        "<ref ",
        "<!--",
        "'''",
        "[http://",
        "{|",
        "[[a]]",
        "<",
        "&",
        "__A",
        "[[a|{{b",
    ],
)
def test_markup_of_any_form_takes_time_that_grows_with_it(part: str) -> None:
    seconds = {}
    for times in (10_000, 80_000):
        text = part * times + "]]" * (times if part == "[[a " else 0)
        began = time.process_time()
        plain_text(text, {"file"})
        seconds[times] = time.process_time() - began
    assert seconds[80_000] < 24 * seconds[10_000] + 0.5  # 8 times the length


def test_no_text_breaks_the_cleaner() -> None:
    draw = random.Random(0)
    parts = ["{{", "}}", "[[", "]]", "{|", "|}", "|", "<ref>", "</ref>", "<ref/>", "<!--", "-->",
             "\n", "a", " ", "'''", "<b>", "[http://a b]", "&amp;", "File:", "=", "*"]  # fmt: skip
    for _ in range(2000):
        plain_text("".join(draw.choices(parts, k=draw.randrange(40))), {"file"})


@pytest.mark.heavy
@pytest.mark.parametrize(
    "unit", ["[//a ", "[//a" + " " * 50, "[[", "{{", "<a ", "'", "&#9", "<!--"]
)
def test_an_odd_article_takes_time_that_grows_with_its_length(unit: str) -> None:
    for text in (unit * (200_000 // len(unit)), unit + " " * 200_000, unit + "9" * 200_000):
        begun = time.process_time()
        plain_text(text)
        assert time.process_time() - begun < 3


def test_a_reference_to_no_character_is_one_sign() -> None:
    assert plain_text("a&#" + "9" * 5000 + "; &#65; &#x" + "f" * 5000 + ";") == "a\ufffd A \ufffd"
