"""The place of the runs: its room, its speed and its file locks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shardyard.config.schema.recipe import Checkpoint
from shardyard.doctor.finding import Finding
from shardyard.doctor.storage import (
    CheckpointSpace,
    check_disk,
    check_locks,
    check_space,
    disk_finding,
    measure_write_bytes_per_s,
)
from shardyard.errors import StorageError

MIB, GIB = 2**20, 2**30


def said(finding: Finding) -> str:
    return f"{finding.verdict}: {finding.what}. {finding.mend}"


@pytest.mark.parametrize(
    ("free", "speed", "checkpoint", "words"),
    [
        (100 * GIB, GIB, None, "ok: /runs: 100.0 GiB free, writes 1.0 GiB/s"),
        (100 * GIB, GIB, 20 * GIB, "ok: /runs: 100.0 GiB free, writes 1.0 GiB/s; a checkpoint of "),
        (50 * GIB, GIB, 20 * GIB, "problem: /runs: 50.0 GiB free, writes 1.0 GiB/s, but 3 checkpo"),
        (500 * GIB, 10 * MIB, 20 * GIB, "warning: /runs: 500.0 GiB free, writes 10.0 MiB/s; a ch"),
        (100 * MIB, GIB, None, "problem: /runs: 100.0 MiB free"),
    ],
)
def test_the_run_folder(free: int, speed: float, checkpoint: int | None, words: str) -> None:
    room = CheckpointSpace(free_bytes=free, checkpoint_bytes=checkpoint, retained=2)
    finding = disk_finding(Path("/runs"), room, bytes_per_s=speed)
    assert said(finding).startswith(words)


def test_writing_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    assert measure_write_bytes_per_s(tmp_path, num_bytes=8 * MIB) > 0
    assert list(tmp_path.iterdir()) == []
    finding = check_disk(tmp_path / "not" / "there", Checkpoint())
    assert finding.what.startswith(f"{tmp_path}: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    finding = check_disk(tmp_path, Checkpoint())
    assert "cannot be written" in finding.what and "run.dir" in finding.mend


def test_a_place_without_room_for_a_checkpoint_is_rejected_before_training(
    tmp_path: Path,
) -> None:
    place, kept = tmp_path / "runs" / "a", Checkpoint(keep_last=2)
    assert check_space(place, kept, checkpoint_bytes=1, written=0) is None
    with pytest.raises(StorageError, match=r"free, and one checkpoint takes 1.0 PiB. Free some ro"):
        check_space(place, kept, checkpoint_bytes=2**50, written=0)


def test_a_place_with_room_for_fewer_checkpoints_than_are_kept_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.doctor.storage.free_bytes_of", lambda _: 30 * GIB)
    kept = Checkpoint(keep_last=2)  # and the best one, and the next before the oldest goes
    warning = check_space(tmp_path, kept, checkpoint_bytes=10 * GIB, written=0)
    assert warning == (
        f"{tmp_path} has 30.0 GiB free, and 4 checkpoints of 10.0 GiB take 40.0 GiB. Free some "
        "room, choose another place with run.dir=FOLDER, or lower checkpoint.keep_last."
    )
    assert check_space(tmp_path, kept, checkpoint_bytes=10 * GIB, written=1) is None
    fewer = Checkpoint(keep_last=1, keep_best=False)
    assert check_space(tmp_path, fewer, checkpoint_bytes=10 * GIB, written=0) is None


def test_a_place_that_counts_no_blocks_is_left_to_what_writes_there() -> None:
    """/proc has neither room nor files: "0 B free" would send somebody to free some."""
    assert check_space(Path("/proc/runs"), Checkpoint(), checkpoint_bytes=2**20, written=0) is None


def test_a_place_without_file_locks_is_named_with_its_mount_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert check_locks(tmp_path) == []

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (finding,) = check_locks(tmp_path)
    assert said(finding).startswith(f"warning: {tmp_path} has no file locks (flock: Function not ")
    assert finding.mend == "Mount it with locks (`-o flock` on Lustre)."
