"""Where sentences end, and documents as sentences: a rule of our own, the same on every machine.

A sentence ends behind ``. ! ?`` and their like in other scripts, with the quotes and brackets that
close there, if a space follows and no small letter; behind the full stops of Chinese and Japanese
without a space. A full stop ends none behind a single letter (``J. Smith``, ``e.g.``), a usual
abbreviation (``Mr.``) or a number that begins a sentence (``2. Then``). A blank line ends a
sentence, and so does a line end before an item of a list. Other line ends are spaces: lines are
often broken by their length alone.

After rules SB6 to SB11 of https://unicode.org/reports/tr29/ (version 16), which know no
abbreviations. No package is needed, whose next version would cut the same text in another way.
"""

# ruff: noqa: RUF001 - full stops and quotes of many scripts
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from shardyard.data.byte_ranges import Section
from shardyard.data.encoders import Column, Encoded, PlainText

SENTENCE = "sentence"
"""Name of the column."""
WITHIN, BEGINS, NO_SENTENCE = 0, 1, 2
"""What it says of a token: NO_SENTENCE of those that begin or end a document."""

_END = re.compile(
    r"(?<![.!?…؟۔।॥։])[.!?…؟۔।॥։]++[\"'”’»)\]]*+(?=\s)"
    r"|[。！？｡]++[”’」』）]*+"
    r"|\n[^\S\n]*+\n"
    r"|\n(?=[^\S\n]*(?:[-*•+]|\d{1,3}[.)])\s)"
)
"""Each part is read once, also of a million dots: possessive, and begun at the first of a run."""
_SPACE = re.compile(r"\s++")
_LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*")
"""A letter, or some with full stops between them."""
_LONGEST_WORD = 20
"""Characters before a full stop that are looked at."""
_ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "col", "sgt", "capt", "lt", "st", "mt", "no",
    "nos", "vol", "vols", "fig", "figs", "eq", "ch", "sec", "pp", "ed", "eds", "vs", "cf",
    "approx", "al", "inc", "ltd", "co", "corp", "jr", "sr", "dept", "est", "bros", "hr", "fr",
    "nr", "bzw", "ca", "usw", "bd", "mme", "mlle",
}  # fmt: skip


def split_sentences(text: str) -> Iterator[str]:
    """The sentences of a text, one after the other: together they are the text, space included.

    The space between two belongs to the second, as the tokens of a byte-level BPE have it.
    """
    start, first = 0, _first_letter(text, 0)
    for found in _END.finditer(text):
        is_line = found[0][0] == "\n"
        stop = found.start() if is_line else found.end()
        if stop > first and (is_line or _ends(text, start, found)):
            yield text[start:stop]
            start, first = stop, _first_letter(text, stop)
    if start < len(text):
        yield text[start:]


def _first_letter(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _ends(text: str, start: int, found: re.Match[str]) -> bool:
    """Whether a sentence that began at ``start`` ends here."""
    behind = _first_letter(text, found.end())
    if behind > found.end() and text[behind : behind + 1].islower():
        return False
    if found[0] != ".":
        return True
    before = text[max(start, found.start() - _LONGEST_WORD) : found.start()]
    words = before.split()
    if not words or before[-1].isspace():
        return True
    word = words[-1].lstrip("([\"'“‘«").lower()
    is_item = len(words) == 1 and word.isdigit()
    return not (is_item or word in _ABBREVIATIONS or _LETTERS.fullmatch(word))


class SentenceText(PlainText):
    """A document as sentences: a column says of each token whether one begins with it."""

    columns: ClassVar[Mapping[str, Column]] = {
        SENTENCE: Column(dtype="|u1", begin=NO_SENTENCE, end=NO_SENTENCE)
    }

    def encode(self, section: Section) -> list[Encoded]:
        ids: list[int] = []
        marks: list[int] = []
        for sentence in split_sentences(section.text):
            own = self.tokenizer.encode(sentence)
            begins = BEGINS if sentence.strip() else WITHIN
            ids += own
            marks += [begins, *[WITHIN] * (len(own) - 1)][: len(own)]
        return [Encoded(ids, {SENTENCE: marks})]
