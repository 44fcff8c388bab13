"""Files and functions stay as small as a reader can hold: aims of the house, with what is above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "shardyard"
FILE_LINES, FUNCTION_LINES = 650, 60
ABOVE = {
    "parallel/apply.py:parallelize": 62,
    "train/setup.py:set_up_phase": 62,
}
"""Lines of what is longer; none of these may grow, and nothing may join them."""


def _sizes() -> Iterator[tuple[str, int, int]]:
    """Name, lines and aim of every file, and of every function without its docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        yield name, text.count("\n"), FILE_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_words = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[1 if has_words else 0]
                lines = (node.end_lineno or first.lineno) - first.lineno + 1
                yield f"{name}:{node.name}", lines, FUNCTION_LINES


@pytest.mark.heavy
def test_no_file_and_no_function_grows_beyond_what_a_reader_holds() -> None:
    too_long = {name: lines for name, lines, aim in _sizes() if lines > ABOVE.get(name, aim)}
    assert too_long == {}
