"""What a page shows of the output of its commands, and whether that was printed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.test_docs import _FENCED

_NUMBER = re.compile(r"\d[\d.,]*(?: [KMGT]\b)?")
_TIME = re.compile(r"0 (?:us|ms|s|min|h|d)\b(?: 0 (?:ms|s|min|h)\b)*")


@dataclass(frozen=True)
class Step:
    """Commands of a page, in their order, with the lines that it shows of their output."""

    commands: list[str]
    shown: list[str]
    is_console: bool


def steps_of(page: Path) -> Iterator[Step]:
    """Blocks for a shell, of which a block of text behind one shows the output; and consoles."""
    blocks = _FENCED.findall(page.read_text().replace("\\\n", " "))
    for (language, block), (kind, text) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "sh":
            yield Step(block.splitlines(), text.splitlines() if kind == "text" else [], False)
        if language == "console":
            for part in block.removeprefix("$ ").split("\n$ "):
                command, *shown = part.splitlines()
                yield Step([command], shown, True)


def not_printed(shown: list[str], printed: str, *, numbers: bool = True) -> list[str]:
    """Lines shown that are in no line printed.

    ``...`` is any text of a line, and any number of blanks is the same. Without ``numbers`` each
    number equals any other, thousands and units of time included: 711 ms may be shown as 1.48 s.
    """

    def plain(text: str) -> str:
        kept = text if numbers else _TIME.sub("0 s", _NUMBER.sub("0", text))
        return " ".join(kept.split())

    lines = "\n".join(plain(line) for line in printed.splitlines())
    wanted = {
        line: r"[^\n]*".join(re.escape(plain(part)) for part in line.split("...")) for line in shown
    }
    return [line for line in shown if not re.search(wanted[line], lines)]
