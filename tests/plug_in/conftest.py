"""An empty folder on the path, and the package `letters` in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plug_in.packages import Packages, forget

LETTERS = Path(__file__).parent / "letters"
POINTS = {
    "tasks": {"vowels": "letters.row:ROW"},
    "families": {"helium": "letters.family:HELIUM"},
    "sources": {"letters": "letters.scheme:SHELF", ".ltr": "letters.reader:LTR"},
    "launchers": {"paper-mail": "letters.launcher:PaperMail"},
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """An empty folder on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    forget()
    yield Packages(folder)
    forget()


@pytest.fixture
def letters(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """The package beside this file."""
    monkeypatch.syspath_prepend(LETTERS)
    packages.add("shardyard-letters", POINTS)
    return packages
