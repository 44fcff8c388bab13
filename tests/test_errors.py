"""The drawing at the top of errors.py is the tree of classes, with the exit codes they have.

Schedulers restart by these numbers, and scripts of users read them.
"""

import ast
import pickle
import re
from pathlib import Path

from shardyard import errors
from shardyard.errors import ShardyardError


def drawn() -> dict[str, tuple[str, int]]:
    """Class -> the one above it, and its exit code."""
    found: dict[str, tuple[str, int]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if entry := re.match(r"    ([│├└─ ]*)(\w+Error) +(?:exit code )?(\d+):", line):
            depth = len(entry[1]) // 4
            above[depth:] = [entry[2]]
            found[entry[2]] = (above[depth - 1] if depth else "Exception", int(entry[3]))
    return found


def test_the_drawing_names_every_error_with_its_parent_and_exit_code() -> None:
    classes: list[type[ShardyardError]] = [ShardyardError]
    for each in classes:
        classes += [kind for kind in each.__subclasses__() if kind.__module__ == errors.__name__]
    assert drawn() == {
        each.__name__: (each.__bases__[0].__name__, each.exit_code) for each in classes
    }


def test_exit_codes_are_those_that_schedulers_and_scripts_were_told() -> None:
    codes = {each.exit_code for each in ShardyardError.__subclasses__()}
    assert codes | {ShardyardError.exit_code, errors.EXIT_INTERRUPTED, errors.EXIT_DRAINED} == {
        1,
        2,
        3,
        4,
        75,
        130,
        143,
    }
    assert errors.LostNodeError.exit_code == 75
    assert (errors.EXIT_INTERRUPTED, errors.EXIT_DRAINED) == (130, 143)


SOURCES = sorted(Path("src/shardyard").rglob("*.py"))
PAGE = re.compile(r"[a-z][a-z-]*(/[a-z-]+)?#[a-z0-9-]+")


def pages() -> set[str]:
    """Every page that an error names: of a class, a constant, or where it is raised."""
    named = (
        node.value
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text for text in named if PAGE.fullmatch(text)}


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_page_of_an_error_exists_with_its_section() -> None:
    found = pages()
    assert errors.OutOfMemoryError.page in found and errors.StorageError.page in found
    for page in found:
        name, _, anchor = page.partition("#")
        assert anchor in anchors(Path("docs") / f"{name}.md"), page


def test_an_error_shows_the_page_of_its_class_or_its_own() -> None:
    full = errors.StorageError("no room")
    assert full.described == f"no room\ndocs: {errors.StorageError.page}"
    assert errors.RequestError("wrong").described == "wrong"
    asked = errors.RequestError("wrong", page="hangs#pauses")
    assert asked.described == "wrong\ndocs: hangs#pauses"
    assert asked.to_json() == {"error": "wrong", "exit_code": 2, "page": "hangs#pauses"}
    assert pickle.loads(pickle.dumps(asked)).page == "hangs#pauses"
