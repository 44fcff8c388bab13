"""Names in the field's words: one class for each name, and no word that the field does not use."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.test_layers import BASE, CONTROL, MODULES, TRAINING, package_of, shown, tree_of

ROOT = Path(__file__).parents[1]

FOREIGN = {
    "told", "tell", "tells", "said", "beside", "stands", "mend", "mends", "sight", "meeting",
    "parked", "neighbour", "neighbours", "held", "looks", "wish", "wishes",
}  # fmt: skip
"""Words for which the field has others: logged, alongside, is, repair, visibility, rendezvous,
standby, peer, stored, probes, request."""
PROTOCOLS = {"tell"}
"""Methods that Python's file protocol names."""


def _words(name: str) -> set[str]:
    """``_HeldSnapshots`` -> held, snapshots."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("half", [CONTROL, TRAINING], ids=["control", "training"])
def test_a_public_class_name_stands_for_one_class_in_its_half(half: set[str]) -> None:
    places = defaultdict(list)
    for path in MODULES:
        if package_of(path) in half | BASE:
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(shown(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_file_class_or_function_has_a_word_that_the_field_does_not_use() -> None:
    guilty = [shown(path) for path in MODULES if _words(path.stem) & FOREIGN]
    for path in MODULES:
        guilty += [
            f"{shown(path)}:{node.lineno} {node.name}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and _words(node.name) & FOREIGN
            and node.name not in PROTOCOLS
        ]
    assert guilty == []


REGISTRIES = {
    "config/optimizers.py", "config/tasks.py", "config/sources.py", "config/data_choices.py",
    "data/formats.py", "launchers/base.py", "families/registry.py", "cli/__init__.py",
}  # fmt: skip


def test_contributing_says_how_to_add_to_every_registry() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {file for file in REGISTRIES if file not in text} == set()
