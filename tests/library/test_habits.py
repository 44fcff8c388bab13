"""Each habit on the page for those who come from DDP is run by a test, and says what it reads."""

import ast
import re
from pathlib import Path

import pytest

from tests.library.habits import HABITS, counts, outcomes

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "from-ddp.md"
ROWS = list(outcomes())


def _strings(source: str) -> list[str]:
    """Of a module; adjacent ones are one."""
    nodes = ast.walk(ast.parse(source))
    return [str(node.value) for node in nodes if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("test", sorted({test for *_, row in ROWS for test in row.tests}))
def test_the_test_of_a_habit_exists(test: str) -> None:
    file, _, rest = test.partition("::")
    name, _, case = rest.partition("[")
    source = (HERE / file).read_text()
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert name in functions
    assert not case or case.rstrip("]") in _strings(source)


@pytest.mark.parametrize(
    ("script", "words"), [(row.script, words) for *_, row, out in ROWS for words in out.words]
)
def test_the_words_of_a_rejection_are_read_by_its_test(script: str, words: str) -> None:
    tests = {test for *_, row, out in ROWS if row.script == script for test in out.tests}
    read = [text for test in tests for text in _strings((HERE / test.split("::")[0]).read_text())]
    assert any(words in text for text in read)


def test_every_row_says_by_which_test_and_a_rejection_by_which_words() -> None:
    for framework, layout, row, outcome in ROWS:
        assert outcome.tests, (framework, layout, row.script)
        assert bool(outcome.words) == (outcome.how == "rejected by name"), row.script
    assert {framework for framework, _ in counts()} == set(HABITS)
    assert not any(
        "works equal" in found for (name, _), found in counts().items() if name == "DeepSpeed"
    ), "it is not installed"


def test_the_page_is_short() -> None:
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", PAGE.read_text())) < 1000
