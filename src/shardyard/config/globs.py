"""Separate the literal part of a path or address from the pattern behind it.

A name that exists is literal, with any characters: ``runs[1]/*.txt`` lists the folder
``runs[1]``, where there is one. Only a name that does not exist is read as a pattern.
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MAGIC = "*?["
"""Characters that make a pattern of a name."""


def has_magic(text: str) -> bool:
    """Whether a text can be a pattern."""
    return any(sign in text for sign in MAGIC)


def count_literal(parts: Sequence[str], exists: Callable[[str], bool]) -> int:
    """Leading parts that are literal: up to the first that can be a pattern and does not exist.

    Args:
        exists: Whether something has the name of some leading parts, joined by slashes.
    """
    for number, part in enumerate(parts):
        if has_magic(part) and not exists("/".join(parts[: number + 1])):
            return number
    return len(parts)


def split_pattern(path: str) -> tuple[str, str]:
    """The literal part of a path of this machine, and the pattern below it; empty: there is none.

    Raises:
        RuntimeError: It begins with the home folder of an unknown user.
    """
    expanded = str(Path(path).expanduser())
    parts = expanded.split("/")
    count = count_literal(parts, os.path.lexists)
    literal = "/".join(parts[:count]) or ("/" if expanded.startswith("/") else ".")
    return literal, "/".join(parts[count:])


def is_pattern(path: str) -> bool:
    """Whether a path of this machine is a pattern, and not the name of something."""
    return has_magic(path) and bool(split_pattern(path)[1])


def matches_of(path: str) -> Iterator[str]:
    """Paths of this machine that a pattern names; ``**`` goes through any number of folders."""
    literal, pattern = split_pattern(path)
    escaped = glob.escape(literal)
    yield from glob.iglob(os.path.join(escaped, pattern), recursive=True)  # noqa: PTH118, PTH207


def escape_hint(path: str) -> str:
    """Return advice for a pattern with brackets that matches no file; empty without brackets."""
    if "[" not in path:
        return ""
    return " A bracket that belongs to a name is written [[]."
