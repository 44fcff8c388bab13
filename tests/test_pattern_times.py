"""How long patterns take for texts made to keep them busy: not the square of their length.

What others write (scripts, configurations, logs, names) is read with patterns. Each pattern of the
source is given long repetitions of what its own repeats take, of what stands before them, and of
two of them in turn, and an end that fits nothing.
"""

import ast
import re
import time
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src/shardyard"
pytestmark = pytest.mark.heavy

METHODS = {"match", "fullmatch", "search", "sub", "findall", "finditer", "split"}
LENGTH, MOST_S = 10_000, 0.25
"""Time of the square: a second and more; of the length: milliseconds."""

OF_OUR_OWN_TEXT = {
    "report/charts.py": "of the pictures that matplotlib has just made",
    "units.py": "parse_seconds reads 64 characters at most",
}

# what a parsed pattern consists of; re keeps the names in private modules
_parser: Any = re._parser  # type: ignore[attr-defined]
_names: Any = re._constants  # type: ignore[attr-defined]
_CLASSES: dict[Any, str] = {
    _names.CATEGORY_DIGIT: "1",
    _names.CATEGORY_SPACE: " ",
    _names.CATEGORY_NOT_WORD: "-",
}


class Pattern(NamedTuple):
    """One pattern of a file, and how it is used."""

    file: str
    text: str
    flags: int
    methods: Sequence[str]


def patterns() -> Iterator[Pattern]:
    """Those that are written as one text."""
    for path in sorted(SOURCE.rglob("*.py")):
        content = path.read_text()
        if "re." not in content:
            continue
        tree = ast.parse(content)
        names = {
            node.value: node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")):
                continue
            method = ast.unparse(node.func).removeprefix("re.")
            text = node.args[0] if node.args else None
            if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
                continue
            methods = {method}
            if method == "compile":
                name = names.get(node, "?")
                methods = set(re.findall(rf"\b{re.escape(name)}\.(\w+)\(", content))
            flags = [ast.unparse(each) for each in (*node.args[1:], *node.keywords)]
            given = sum(getattr(re, f) for f in re.findall(r"re\.([A-Z]+)", " ".join(flags)))
            used = sorted(methods & METHODS) or ["fullmatch"]
            yield Pattern(path.relative_to(SOURCE).as_posix(), text.value, given, used)


def sample(parts: Any) -> str:
    """A text that the parts of a pattern take."""
    return "".join(_sample_of(kind, value) for kind, value in parts)


def _sample_of(kind: Any, value: Any) -> str:
    if kind is _names.LITERAL:
        return chr(value)
    if kind is _names.IN:
        literals = {chr(each) for name, each in value if name is _names.LITERAL}
        if value[0][0] is _names.NEGATE:
            return next(each for each in "a0 .-/'_b" if each not in literals)
        name, first = value[0]
        if name is _names.CATEGORY:
            return _CLASSES.get(first, "a")
        return chr(first if name is _names.LITERAL else first[0])
    if kind is _names.SUBPATTERN:
        return sample(value[3])
    if kind is _names.BRANCH:
        return sample(value[1][0])
    if kind in (_names.MAX_REPEAT, _names.MIN_REPEAT):
        times: int = max(1, min(value[0], 3))
        return sample(value[2]) * times
    return "a" if kind in (_names.ANY, _names.NOT_LITERAL) else ""


def repeats(parts: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """What stands before each repeat without an end, and what it repeats."""
    for kind, value in parts:
        if kind in (_names.MAX_REPEAT, _names.MIN_REPEAT):
            if value[1] is _names.MAXREPEAT:
                yield before, sample(value[2])
            yield from repeats(value[2], before)
        elif kind is _names.SUBPATTERN:
            yield from repeats(value[3], before)
        elif kind is _names.BRANCH:
            for branch in value[1]:
                yield from repeats(branch, before)
        before += _sample_of(kind, value)


def hard_texts(pattern: Pattern) -> set[str]:
    found = [(b, unit) for b, unit in repeats(_parser.parse(pattern.text, pattern.flags)) if unit]
    texts = {before + unit * (LENGTH // len(unit)) for before, unit in found}
    in_turn = {before + unit for before, unit in found}
    in_turn |= {a + b for a, b in permutations(dict.fromkeys(unit for _, unit in found), 2)}
    return {f"{text}\0" for text in texts | {each * (LENGTH // len(each)) for each in in_turn}}


def seconds(pattern: Pattern) -> float:
    """Of the slowest text; at most a little more than what is too much."""
    compiled = re.compile(pattern.text, pattern.flags)
    worst = 0.0
    for text in hard_texts(pattern):
        for method in pattern.methods:
            began = time.process_time()
            use = getattr(compiled, method)
            found = use("", text) if method == "sub" else use(text)
            if method == "finditer":
                list(found)
            worst = max(worst, time.process_time() - began)
        if worst > MOST_S:
            break
    return worst


def test_a_pattern_that_takes_the_square_is_found() -> None:
    assert seconds(Pattern("x", r"(\d+)$", 0, ["search"])) > MOST_S
    assert seconds(Pattern("x", r"(?<!\d)(\d+)$", 0, ["search"])) < MOST_S


def test_no_pattern_takes_the_square_of_a_text() -> None:
    found = list(patterns())
    assert len(found) > 150
    slow = {
        (p.file, p.text) for p in found if p.file not in OF_OUR_OWN_TEXT and seconds(p) > MOST_S
    }
    assert slow == set()
