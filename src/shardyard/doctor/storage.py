"""The place where runs are written: its room, its speed, and whether it has file locks."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from shardyard.doctor.finding import Finding
from shardyard.errors import StorageError
from shardyard.locks import missing_locks
from shardyard.units import format_bytes, format_seconds

MIB, GIB = 2**20, 2**30


def nearest_folder(path: Path) -> Path:
    """The folder in which a path will be made, or the path itself where it is one."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def free_bytes_of(folder: Path) -> int:
    """Room that this user may fill.

    Raises:
        OSError: The file system does not answer.
    """
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def refuse_little_room(run_dir: Path, *, checkpoint_bytes: float) -> None:
    """Raise if not even one checkpoint fits: all of the training would be lost.

    Raises:
        StorageError: It does not.
    """
    folder = nearest_folder(run_dir)
    with suppress(OSError):
        if not os.statvfs(folder).f_blocks:
            return  # as /proc, which keeps no files and whose room is no number
        free = free_bytes_of(folder)
        if free < checkpoint_bytes:
            raise StorageError(
                f"{folder} has {format_bytes(free)} free, and one checkpoint takes "
                f"{format_bytes(checkpoint_bytes)}. Free some room, or choose another place with "
                "run.dir=FOLDER."
            )


def lock_warning(folder: Path) -> str | None:
    """What a run has to know of a place without file locks; None: it has them."""
    try:
        why = missing_locks(nearest_folder(folder))
    except OSError:
        return None  # it cannot be written, which others report
    if why is None:
        return None
    return (
        f"{folder} has no file locks (flock: {why}). Shardyard protects a run from being trained "
        "twice on this machine, but not from other machines. Mount it with locks (`-o flock` on "
        "Lustre)."
    )


def check_locks(run_dir: Path) -> list[Finding]:
    """Whether files can be locked where runs will be; nothing where they can."""
    warning = lock_warning(run_dir)
    if warning is None:
        return []
    what, _, mend = warning.partition(" Mount")
    return [
        Finding(name="file locks", verdict="warning", what=what.rstrip("."), mend=f"Mount{mend}")
    ]


def check_disk(run_dir: Path, *, checkpoint_bytes: int | None, checkpoints: int) -> Finding:
    """Room and measured speed of the place where runs will be."""
    folder = nearest_folder(run_dir)
    try:
        speed = measure_write_bytes_per_s(folder)
    except OSError as error:
        return Finding(
            name="run folder", verdict="problem",
            what=f"{folder} cannot be written: {error.strerror}",
            mend="Make it yours, or choose another with run.dir.",
        )  # fmt: skip
    return judge_disk(
        folder, free_bytes=free_bytes_of(folder), bytes_per_s=speed,
        checkpoint_bytes=checkpoint_bytes, checkpoints=checkpoints,
    )  # fmt: skip


def judge_disk(
    folder: Path,
    *,
    free_bytes: int,
    bytes_per_s: float,
    checkpoint_bytes: int | None,
    checkpoints: int,
) -> Finding:
    """Whether the checkpoints fit, and can be written in reasonable time."""
    what = f"{folder}: {format_bytes(free_bytes)} free, writes {format_bytes(bytes_per_s)}/s"
    # one more than is kept: the old one goes once the new one is durable
    needed = (checkpoints + 1) * (checkpoint_bytes or 0)
    if needed > free_bytes or free_bytes < GIB:
        wanted = f", but {checkpoints} + 1 checkpoints take {format_bytes(needed)}" * bool(needed)
        return Finding(
            name="run folder", verdict="problem", what=what + wanted,
            mend="Free some, choose another place with run.dir, or lower checkpoint.keep_last.",
        )  # fmt: skip
    if checkpoint_bytes is None:
        return Finding(name="run folder", verdict="ok", what=what)
    seconds = checkpoint_bytes / bytes_per_s
    what += f"; a checkpoint of {format_bytes(checkpoint_bytes)} takes {format_seconds(seconds)}"
    if seconds > 600:
        return Finding(
            name="run folder", verdict="warning", what=what,
            mend="Training goes on while it is written, but so much is lost with a machine. Use "
            "faster storage.",
        )  # fmt: skip
    return Finding(name="run folder", verdict="ok", what=what)


def measure_write_bytes_per_s(
    folder: Path, *, num_bytes: int = 64 * MIB, limit_s: float = 3.0
) -> float:
    """Write a file, flush it to the disk, remove it.

    Args:
        limit_s: On slow storage less is written.

    Raises:
        OSError: The folder cannot be written.
    """
    piece = os.urandom(4 * MIB)  # no file system can make it smaller
    started, written = time.monotonic(), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < num_bytes and time.monotonic() - started < limit_s:
            written += file.write(piece)
            os.fsync(file.fileno())
    return written / (time.monotonic() - started)
