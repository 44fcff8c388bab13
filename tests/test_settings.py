"""Every setting is documented, and read by code: one that nothing reads is a broken promise."""

import ast
from keyword import iskeyword
from pathlib import Path

import pytest

from shardyard.config.schema.base import Section
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import settings

PACKAGE = Path(__file__).parents[1] / "src" / "shardyard"

# The schema declares; the check only refuses; neither makes use of a value.
NOT_A_USE = {
    "config/schema/recipe.py",
    "config/rules/check.py",
    "config/rules/observe.py",
    "config/rules/launch.py",
}


def reads(tree: ast.AST) -> set[str]:
    """``section.key`` for each setting that a module reads.

    ``….section.key`` and ``section.key``, and ``name.key`` where the module gives the section that
    name: ``name = ….section``, or an argument ``name: Section``. A section in a section is known by
    its own name: ``slurm.partition``.
    """
    names = section_names(tree)
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Attribute):
            found.add(f"{node.value.attr}.{node.attr}")
        elif isinstance(node.value, ast.Name):
            found |= {f"{name}.{node.attr}" for name in names.get(node.value.id, {node.value.id})}
    return found


def section_names(tree: ast.AST) -> dict[str, set[str]]:
    """What a module calls a section -> the section's own name."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            for target in node.targets:
                if isinstance(target, ast.Name) and node.value.attr in SECTIONS.values():
                    found.setdefault(target.id, set()).add(node.value.attr)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            kind = ast.unparse(node.annotation).rpartition(".")[2]
            if kind in SECTIONS:
                found.setdefault(node.arg, set()).add(SECTIONS[kind])
    return found


def section_classes(kind: type[Section] = Recipe) -> dict[str, str]:
    """Class of the schema -> the name that its section has."""
    found: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= {inner.__name__: name, **section_classes(inner)}
    return found


SECTIONS = section_classes()


@pytest.fixture(scope="module")
def all_reads() -> set[str]:
    """What the package reads: no worker but the one that runs this file looks."""
    return {
        name
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in NOT_A_USE
        for name in reads(ast.parse(path.read_text()))
    }


@pytest.mark.parametrize("name", settings())
def test_every_setting_is_documented(name: str) -> None:
    assert settings()[name].sentence.endswith(".")


@pytest.mark.parametrize("name", settings())
def test_every_setting_is_read(name: str, all_reads: set[str]) -> None:
    last = ".".join(name.split(".")[-2:])
    last += "_" * iskeyword(last.rpartition(".")[2])  # run.from is `run.from_` in Python
    assert {last, f"recipe.{name}"} & all_reads  # secrets is a section and a setting at once
