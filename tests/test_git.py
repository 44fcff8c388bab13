"""A repository's own configuration starts no program when we ask git about its folder."""

import subprocess
from pathlib import Path

import pytest

from shardyard.git import git
from shardyard.rundir.manifest import git_state

pytestmark = pytest.mark.heavy


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A repository that somebody else configured; `marker` is made by any of its programs."""
    folder, marker = tmp_path / "repository", tmp_path / "marker"
    run = f"touch {marker}; cat"
    folder.mkdir()
    for words in (
        ["init", "-q"],
        ["config", "user.name", "a"],
        ["config", "user.email", "a@example.org"],
    ):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "a.txt").write_text("one\n")
    (folder / ".gitattributes").write_text("*.txt filter=odd\n")
    subprocess.run(["git", "-C", str(folder), "add", "."], check=True)
    subprocess.run(["git", "-C", str(folder), "commit", "-q", "-m", "x"], check=True)
    for key, value in {
        "core.fsmonitor": f"touch {marker}; false",
        "filter.odd.clean": run,
        "filter.odd.process": run,
    }.items():
        subprocess.run(["git", "-C", str(folder), "config", key, value], check=True)
    (folder / "a.txt").write_text("two\n")
    return folder


def test_a_repositorys_programs_do_not_run(hostile: Path) -> None:
    state = git_state(hostile)
    assert state is not None and state["is_dirty"] is True and len(state["commit"]) == 40
    assert git(hostile, "ls-files", "--others", "--exclude-standard") == ""
    assert not (hostile.parent / "marker").exists()
    subprocess.run(["git", "-C", str(hostile), "status"], check=False, capture_output=True)
    assert (hostile.parent / "marker").exists(), "git itself runs them"


def test_a_folder_without_a_repository_has_no_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
