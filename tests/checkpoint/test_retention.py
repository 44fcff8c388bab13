"""The newest and the best stay; a kill never leaves a part that looks whole."""

import errno
import shutil
from pathlib import Path

import pytest

from shardyard.checkpoint.retention import (
    complete_steps,
    mark_best,
    mark_latest,
    prune,
    read_pointer,
    remove_leftovers,
    set_aside,
)


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "rank-00000.safetensors").write_bytes(b"x")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    fill(tmp_path, *(f"step-{step:08d}" for step in (10, 20, 30, 40, 50)))
    mark_latest(tmp_path, 50)
    mark_best(tmp_path, 20)
    assert prune(tmp_path, 2, keep={30}).steps == [10]
    assert prune(tmp_path, 2).steps == [30]
    assert complete_steps(tmp_path) == [20, 40, 50]


def test_nothing_goes_while_latest_names_nothing(tmp_path: Path) -> None:
    fill(tmp_path, "step-00000010", "step-00000020")
    assert prune(tmp_path, 1).steps == []
    (tmp_path / "latest").write_text("step-00000030\n")
    assert prune(tmp_path, 1).steps == []


def test_a_folder_newer_than_latest_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    fill(tmp_path, "step-00000010", "step-00000020", "step-00000030")
    mark_latest(tmp_path, 20)
    assert prune(tmp_path, 1).steps == [10]
    assert complete_steps(tmp_path) == [20, 30]


def test_a_checkpoint_set_aside_goes_once_the_run_is_past_it(tmp_path: Path) -> None:
    fill(tmp_path, "step-00000010", "step-00000020", "step-00000030")
    set_aside(tmp_path, 30)
    mark_latest(tmp_path, 20)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030.damaged"]
    fill(tmp_path, "step-00000030")
    mark_latest(tmp_path, 30)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_folder_that_cannot_be_removed_is_told_and_removed_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does it while another process has a file of the folder open."""
    fill(tmp_path, "step-00000010", "step-00000020", "step-00000030")
    mark_latest(tmp_path, 30)
    rmtree, busy = shutil.rmtree, [OSError(errno.ENOTEMPTY, "Directory not empty", "F")]

    def once_busy(path: Path) -> None:
        if busy:
            raise busy.pop()
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", once_busy)
    pruned = prune(tmp_path, 1)
    assert pruned.steps == [10, 20]
    assert pruned.not_removed is not None
    assert "F cannot be removed: Directory not empty. Training continues" in pruned.not_removed
    assert names(tmp_path) == ["step-00000010.removed.tmp", "step-00000030"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000030"]


def test_a_name_that_is_taken_by_an_unfinished_removal_is_no_obstacle(tmp_path: Path) -> None:
    fill(tmp_path, "step-00000010", "step-00000020", "step-00000010.removed.tmp")
    mark_latest(tmp_path, 20)
    assert prune(tmp_path, 1).not_removed is None
    assert names(tmp_path) == ["step-00000010.removed.tmp", "step-00000020"]


def test_of_a_checkpoint_that_was_moved_away_only_the_link_goes(tmp_path: Path) -> None:
    checkpoints, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    fill(checkpoints, "step-00000020")
    fill(elsewhere, "step-00000010")
    (checkpoints / "step-00000010").symlink_to(elsewhere / "step-00000010")
    (checkpoints / "step-00000005.removed.tmp").symlink_to(elsewhere)
    mark_latest(checkpoints, 20)
    assert prune(checkpoints, 1).not_removed is None
    remove_leftovers(checkpoints)
    assert names(checkpoints) == ["step-00000020"]
    assert names(elsewhere) == ["step-00000010"]


def test_only_final_names_count(tmp_path: Path) -> None:
    fill(tmp_path, "step-00000010", "step-00000020.tmp", "step-7", "step-00000030.damaged", "x")
    assert complete_steps(tmp_path) == [10]
    assert complete_steps(tmp_path / "nowhere") == []


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, "step-00000010", "step-00000020.tmp", "step-00000005.removed.tmp")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000010"]


@pytest.mark.parametrize("text", ["", "step-00000099", "../step-00000010"])
def test_a_pointer_to_nothing_names_nothing(tmp_path: Path, text: str) -> None:
    fill(tmp_path, "step-00000010")
    (tmp_path / "latest").write_text(text)
    assert read_pointer(tmp_path, "latest") is None
