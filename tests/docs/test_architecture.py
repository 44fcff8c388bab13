"""ARCHITECTURE.md and the design notes name files that exist, and its drawing is the code's.

That docs/architecture.svg is current is tested with the other generated files, in test_pages.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.generate import architecture
from docs.generate.architecture import PACKAGE, ROOT

MAP = (ROOT / "ARCHITECTURE.md").read_text()
NOTES = sorted((ROOT / "internals").glob("*.md"))
ROOTS = (PACKAGE, ROOT)
"""Folders that a page's paths may start from."""

PATHS = re.compile(r"### (.+)\n\n((?:.+\n)+)\n((?:`.+\n)+)")
"""A path through the code: its heading, what happens, and the files in order."""


def python_files(text: str) -> Iterator[str]:
    """Names in backticks that end in .py, stars included."""
    yield from re.findall(r"`([\w./*-]+\.py)`", text)


def exists(name: str) -> bool:
    return any(next(root.glob(name), None) for root in ROOTS)


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", *NOTES], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in python_files(page.read_text()) if not exists(name)] == []


def test_a_missing_file_is_found() -> None:
    assert list(python_files("`train/loop.py`, `a/gone.py`")) == ["train/loop.py", "a/gone.py"]
    assert exists("train/loop.py")
    assert exists("launchers/*/checks.py")
    assert not exists("a/gone.py")


def test_the_map_stays_small() -> None:
    assert len(MAP.split()) <= 900


def test_the_map_has_each_package_once() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    rows = re.findall(r"^\| `(\w+)/` \|", MAP, re.MULTILINE)
    assert sorted(rows) == sorted(packages)


def test_the_map_has_eight_paths_of_four_to_eight_files() -> None:
    lengths = {heading: len([*python_files(files)]) for heading, _, files in PATHS.findall(MAP)}
    assert len(lengths) == 8
    assert {heading: count for heading, count in lengths.items() if not 4 <= count <= 8} == {}


def test_the_drawing_has_each_package_and_no_arrow_upwards() -> None:
    drawing = ElementTree.fromstring(architecture.drawing())
    words = {element.text for element in drawing.iter() if element.tag.endswith("}text")}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= words
    arrows = [path.get("d", "") for path in drawing.iter() if path.get("class") == "line"]
    curves = [re.findall(r"[-\d]+", arrow) for arrow in arrows if "C" in arrow]
    assert curves
    assert all(int(numbers[1]) < int(numbers[-1]) for numbers in curves)


def test_an_import_that_follows_from_others_has_no_arrow() -> None:
    imports = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert architecture.reduced(imports) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_a_new_import_and_a_new_row_change_the_drawing(tmp_path: Path) -> None:
    for name, text in {
        "train/loop.py": "def run():\n    from shardyard.data.images import order\n",
        "train/step.py": "import shardyard.io.files\n",
        "data/images/order.py": "from shardyard import units\n",
        "units.py": "import math\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rooms = {"train", "data", "data.images", "units", "io"}
    assert architecture.imports_between(tmp_path, rooms) == {
        "train": {"data.images", "io"},
        "data": set(),
        "data.images": {"units"},
        "units": set(),
        "io": set(),
    }
    rows = tmp_path / "rows.py"
    rows.write_text('ROWS = [{"io.files", "units"}, {"io.yaml"}, {"train"}]\n')
    found = architecture.without_io_parts(architecture.rows_named("ROWS", rows))
    assert found == [{"units"}, {"train"}]
    with pytest.raises(ValueError, match="no constant OTHER"):
        architecture.rows_named("OTHER", rows)
