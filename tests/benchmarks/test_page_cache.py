"""Which files are in memory, where a run removes old checkpoints beside the one who looks."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("kept", "removed"):
        (tmp_path / name).write_bytes(bytes(4096))
    return tmp_path


def test_what_is_removed_before_it_is_dropped_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, really = [], os.open

    def open_late(path: Path, flags: int) -> int:
        (folder / "removed").unlink(missing_ok=True)
        opened.append(path.name)
        return really(path, flags)

    monkeypatch.setattr(os, "open", open_late)
    page_cache.drop(folder)
    assert opened == ["kept", "removed"]


@pytest.mark.heavy
def test_what_is_removed_before_it_is_counted_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = subprocess.run

    def run_late(command: list[str], **options: Any) -> Any:
        (folder / "removed").unlink(missing_ok=True)
        return really(command, **options)

    monkeypatch.setattr(subprocess, "run", run_late)
    assert page_cache.cached_bytes(folder) == 4096


def test_files_that_cannot_be_looked_at_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "fincore: no such call")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(RuntimeError, match="no such call"):
        page_cache.cached_bytes(folder)
