"""Wikipedia's markup taken away: what is left is running text, in paragraphs.

Left out are templates, tables, references, formulas, files, categories, comments, headings and
lists, as WikiExtractor leaves them out; of a link its words stay. What is opened and never closed
is taken for text. Read once from its beginning to its end: no text takes time with its square.

Source: https://www.mediawiki.org/wiki/Help:Formatting and Help:Links.
"""

import html
import re
from collections import Counter
from collections.abc import Collection

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
"""With what stands between them; of others the words stay."""
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
"""How lines of lists, tables and headings begin."""


def plain_text(markup: str, namespaces: Collection[str] = ()) -> str:
    """The paragraphs of an article, a blank line between any two; "" where there are none.

    Args:
        namespaces: Lower-case names, in the wiki's language, that files, categories and others
            stand under: links to them are left out.
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


def _role(found: re.Match[str]) -> tuple[str, str]:
    """What a token closes, and what will close what it opens; "" if it does neither."""
    if found["open"]:
        return "", _CLOSED_BY[found["open"]]
    if found["close"]:
        return found["close"], ""
    tag = (found["tag"] or "").lower()
    if tag not in _DROPPED_TAGS or found["alone"]:
        return "", ""
    return (tag, "") if found["end"] else ("", tag)


def _closed(opened: list[tuple[str, int]], waiting: Counter[str], closes: str) -> int:
    """Where what is closed now began; what was opened within it and never closed is forgotten."""
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
