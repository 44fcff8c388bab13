"""Every setting is documented, and read by code: one that nothing reads is a broken promise."""

import ast
from pathlib import Path

import pytest

from shardyard.config.document import settings

PACKAGE = Path(__file__).parents[1] / "src" / "shardyard"

# The schema declares; the check only refuses; neither makes use of a value.
NOT_A_USE = {"config/schema.py", "config/check.py", "config/trainable.py"}


def reads(tree: ast.AST) -> set[str]:
    """``section.key`` for each ``….section.key`` or ``section.key`` in a module.

    A section in a section is known by its own name: ``slurm.partition``.
    """
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Attribute):
            found.add(f"{node.value.attr}.{node.attr}")
        elif isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


READ = {
    name
    for path in PACKAGE.rglob("*.py")
    if str(path.relative_to(PACKAGE)) not in NOT_A_USE
    for name in reads(ast.parse(path.read_text()))
}

# Refused unless they have their default, as what they ask for is not built yet.
NOT_BUILT = {"model.module", "memory.offload"}


@pytest.mark.parametrize("name", settings())
def test_every_setting_is_documented(name: str) -> None:
    assert settings()[name].sentence.endswith(".")


@pytest.mark.parametrize("name", sorted(set(settings()) - NOT_BUILT))
def test_every_setting_is_read(name: str) -> None:
    last = ".".join(name.split(".")[-2:])
    assert {last, f"recipe.{name}"} & READ  # secrets is a section and a setting at once


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_what_is_not_built_says_so(name: str) -> None:
    sentence = settings()[name].sentence.lower()
    assert "not built yet" in sentence or "not trained yet" in sentence
