"""Text that would act on a terminal is shown, not sent."""

import sys
import unicodedata

import pytest

from shardyard.io.sanitize import log_line, sanitize

ACTS = {
    "\x1b]52;c;ZXZpbA==\x07": r"\x1b]52;c;ZXZpbA==\x07",  # writes the clipboard
    "\x1b]0;title\x1b\\": r"\x1b]0;title\x1b" + "\\",
    "\x1b[2J\x1b[H": r"\x1b[2J\x1b[H",
    "\x9b2J": r"\x9b2J",  # the same in one character
    "\u202egpj.exe": r"\u202egpj.exe",
    "a\x00\x7f\x08\x08b": r"a\x00\x7f\x08\x08b",
    "\udcff": r"\udcff",
}


@pytest.mark.parametrize("text", ACTS)
def test_what_acts_on_a_terminal_is_written_out(text: str) -> None:
    assert sanitize(f"loss {text} 2") == f"loss {ACTS[text]} 2"


def test_no_character_that_unicode_calls_a_control_is_left() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    left = {c for c in sanitize(every) if unicodedata.category(c) in ("Cc", "Cs")}
    assert left == {"\n", "\t"}
    orders = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not {c for c in sanitize(every) if unicodedata.bidirectional(c) in orders}


def test_words_of_any_script_stay_as_they_are() -> None:
    text = "Verlust 3,5 \u2192 \u635f\u5931 \u05d0\u05d1 \U0001f600 \\x1b\ttab\nline"
    assert sanitize(text) == text


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\r 20%\r 30%", " 30%"),
        ("windows\r", "windows"),
        ("\r", ""),
        ("", ""),
        ("a\r\x1b[Kb", r"\x1b[Kb"),
    ],
)
def test_of_a_progress_bar_its_last_state_is_shown(line: str, shown: str) -> None:
    assert log_line(line) == shown
