"""The prose of the user pages and of messages: words and headings stay as readable as they are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
AT_MOST = {
    r"told|is said|is asked": 0.06,
    r"refused?": 0.05,
    r"nobody|nothing|whoever|whatever": 0.1,
    r"alone": 0.04,
    r"stands?": 0.0,
    r"goes on|go on|going on": 0.02,
    r"beside": 0.0,
    r"mends?|mended|anew": 0.02,
}
"""Words that hide who does what -> most in 1,000 words. A limit may only fall."""
AT_MOST_IN_MESSAGES = {
    r"told|is said|is asked": 0.1,
    r"refused?": 0.1,
    r"nobody|nothing|whoever|whatever": 0.3,
    r"alone": 0.2,
    r"stands?": 0.1,
    r"goes on|go on|going on": 0.2,
    r"beside": 0.2,
    r"(?:is|are) (?:no|none)": 0.5,
    r"mends?|mended|anew": 0.1,
}
"""The same of errors, help and other texts that the program prints. A limit may only fall."""
AT_LEAST = {r"you|your|yours": 6.7, r"use|uses|using": 5.2}
CLAUSE_HEADINGS, LONG_COMMANDS = 0, 1
"""Most headings that are clauses, and most commands of over 100 characters. They may only fall."""
WORDS_IN_ALL, PAGES_IN_ALL = 65_300, 66
"""Most words of user pages, code and tables included, and most pages. They may only fall.

A word has a letter or a digit: bars and rules of tables, list marks and operators are none.
"""


def prose(page: str) -> str:
    """A page without code, HTML and targets of links."""
    for pattern in (r"```.*?```", r"<[^>]+>", r"`[^`]*`", r"\]\([^)]*\)"):
        page = re.sub(pattern, " ", page, flags=re.DOTALL)
    return page


WORDS = " ".join(prose(page.read_text()) for page in PAGES)


def messages(source: str) -> Iterator[str]:
    """Texts of more than four words that a file passes to a function; values are an X."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            match argument:
                case ast.Constant(value=str(text)) if text.count(" ") > 3:
                    yield text
                case ast.JoinedStr(values=parts):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else " X "
                        for part in parts
                    )


def per_1000(pattern: str, words: str = WORDS) -> float:
    count = len(re.findall(r"[A-Za-z][A-Za-z'-]*", words))
    return 1000 * len(re.findall(rf"\b(?:{pattern})\b", words, re.IGNORECASE)) / count


@pytest.mark.parametrize("pattern", AT_MOST)
def test_words_of_a_private_language_are_rare(pattern: str) -> None:
    assert per_1000(pattern) <= AT_MOST[pattern]


def test_words_of_a_private_language_are_rare_in_messages() -> None:
    files = (ROOT / "src").rglob("*.py")
    words = "\n\n".join(text for file in files for text in messages(file.read_text()))
    found = {pattern: per_1000(pattern, words) for pattern in AT_MOST_IN_MESSAGES}
    assert {p: n for p, n in found.items() if n > AT_MOST_IN_MESSAGES[p]} == {}
    assert per_1000("you|your|yours", words) >= 2.2


def test_messages_are_what_is_passed_to_a_function() -> None:
    source = 'f("one two three four five", hint=f"a {b} c", word="too short")'
    source += '\ng = "no argument of any call at all"'
    assert list(messages(source)) == ["one two three four five", "a  X  c"]


@pytest.mark.parametrize("pattern", AT_LEAST)
def test_pages_talk_to_the_reader(pattern: str) -> None:
    assert per_1000(pattern) >= AT_LEAST[pattern]


def test_headings_are_nouns_or_imperatives() -> None:
    clause = re.compile(r"^#+ (?:What|Who|Which|Where|Why|Whether|That|Of|As)\b.*$", re.MULTILINE)
    found = [
        f"{page.name}: {heading}"
        for page in PAGES
        for heading in clause.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    ]
    assert len(found) <= CLAUSE_HEADINGS, found


def test_commands_fit_on_a_line() -> None:
    command = re.compile(r"^(?:\$ )?(shardyard .{91,})$", re.MULTILINE)
    found = [(page.name, line) for page in PAGES for line in command.findall(page.read_text())]
    assert len(found) <= LONG_COMMANDS, found


def test_user_pages_become_no_longer_and_no_more() -> None:
    words = sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES)
    assert words <= WORDS_IN_ALL
    assert len(PAGES) <= PAGES_IN_ALL


@pytest.mark.parametrize(("page", "most"), [("README.md", 900), ("CHANGELOG.md", 700)])
def test_the_first_pages_stay_short(page: str, most: int) -> None:
    assert len(prose((ROOT / page).read_text()).split()) <= most
