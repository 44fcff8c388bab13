"""Kills at random moments: the kernel's word of opened files, and the faults in the table."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.timed_kills import TIMED_KILLS, FileOpenWatcher
from shardyard.drill.faults import FAULTS, REMOVED
from tests.drill.test_drill import ONE_NODE, RECIPE


def test_the_opening_of_a_tensor_file_is_told_once_and_that_of_another_not(tmp_path: Path) -> None:
    for name in ("rank-00000.safetensors", "manifest.json"):
        (tmp_path / name).write_bytes(b"0")
    with closing(FileOpenWatcher([tmp_path])) as openings:
        assert not openings.wait_for_open(0.0)
        (tmp_path / "manifest.json").read_bytes()
        assert not openings.wait_for_open(0.0)
        (tmp_path / "rank-00000.safetensors").read_bytes()  # open for some microseconds
        assert openings.wait_for_open(0.0) and not openings.wait_for_open(0.0)


def test_a_folder_that_was_removed_is_left_out(tmp_path: Path) -> None:
    with closing(FileOpenWatcher([tmp_path / "removed", tmp_path])) as openings:
        (tmp_path / "rank-00000.safetensors").write_bytes(b"0")
        assert openings.wait_for_open(0.0)


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        FileOpenWatcher([tmp_path / "file" / "step"])


def test_the_removed_faults_are_those_of_the_benchmark() -> None:
    assert [*TIMED_KILLS] == [*REMOVED] and not FAULTS.keys() & TIMED_KILLS.keys()


def test_a_kill_in_a_copy_needs_a_recipe_that_takes_snapshots() -> None:
    fault = TIMED_KILLS["kill-in-snapshot"]
    drilled = replace(ONE_NODE, words=RECIPE)
    assert fault.impossible_reason(drilled).startswith("the recipe takes none; elastic.snapshot")
    takes = replace(drilled, words=(*RECIPE, "elastic.snapshot_every=2"))
    assert not fault.impossible_reason(takes)
