"""A folder gets its name after all that it holds is on disk; the name is on disk after that."""

import os
import re
from pathlib import Path

import pytest

from shardyard.files import publish_file, publish_folder

SRC = Path(__file__).parents[1] / "src" / "shardyard"
OWN_ORDER = {
    "files.py": 1,
    "checkpoint/retention.py": 3,  # what goes, or is set aside
    "checkpoint/writer.py": 1,  # each rank flushes its own file
    "transfer/receive.py": 1,  # what was there before
    "control/go_back.py": 1,  # sets checkpoints aside
    "doctor/paths.py": 1,
    "drill/strikes.py": 2,
}
"""Files that rename folders without ``publish_folder``, and how often."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flushes and renames in their order, as the kernel is asked for them."""
    asked: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        asked.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)

    def rename(name: str) -> None:
        real = getattr(Path, name)

        def renamed(path: Path, to: Path) -> None:
            asked.append(f"{path.name} -> {to.name}")
            real(path, to)

        monkeypatch.setattr(Path, name, renamed)

    monkeypatch.setattr(os, "fsync", watch)
    rename("rename")
    rename("replace")
    return asked


def test_a_folder_is_published_after_all_its_files_and_folders(
    tmp_path: Path, order: list[str]
) -> None:
    (tmp_path / "draft" / "sub").mkdir(parents=True)
    for name in ("a", "sub/b"):
        (tmp_path / "draft" / name).write_text(name)
    publish_folder(tmp_path / "draft", tmp_path / "out")
    place = order.index("draft -> out")
    assert sorted(order[:place]) == ["a", "b", "draft", "sub"]
    assert order[place + 1 :] == [tmp_path.name]


def test_a_file_is_published_after_its_content(tmp_path: Path, order: list[str]) -> None:
    (tmp_path / "draft").write_text("x")
    publish_file(tmp_path / "draft", tmp_path / "out")
    assert order == ["draft", "draft -> out", tmp_path.name]


def test_nothing_else_gives_a_folder_its_name() -> None:
    texts = {path.relative_to(SRC).as_posix(): path.read_text() for path in SRC.rglob("*.py")}
    found = {name: len(re.findall(r"\.rename\(", text)) for name, text in texts.items()}
    assert {name: count for name, count in found.items() if count} == OWN_ORDER
