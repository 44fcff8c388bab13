"""The place where runs are written: its room, its speed, and whether it has file locks."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.schema.recipe import Checkpoint
from shardyard.doctor.finding import Finding
from shardyard.errors import StorageError
from shardyard.io.files import missing_locks
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


@dataclass(frozen=True, kw_only=True)
class CheckpointSpace:
    """Room for the checkpoints of a run in the folder where they will be."""

    free_bytes: int
    checkpoint_bytes: int | None
    """Bytes of one checkpoint; None if it is not known."""
    retained: int
    """Checkpoints that the run keeps."""
    written: int = 0
    """Kept checkpoints that are already written."""

    @property
    def count(self) -> int:
        """Most at a time: the oldest goes once the new one is durable."""
        return self.retained + 1

    @property
    def needed_bytes(self) -> int:
        """More that they will take."""
        return max(1, self.count - self.written) * (self.checkpoint_bytes or 0)

    @property
    def has_none(self) -> bool:
        """Whether not even the next one fits."""
        return self.free_bytes < (self.checkpoint_bytes or 0)

    @property
    def is_short(self) -> bool:
        """Whether the run comes to a checkpoint that does not fit."""
        return self.free_bytes < self.needed_bytes

    @property
    def words(self) -> str:
        """Describe the space that the checkpoints take; empty if it is not known."""
        if not self.checkpoint_bytes:
            return ""
        more = f" ({self.written} of them written)" if self.written else ""
        return (
            f"{self.count} checkpoints of {format_bytes(self.checkpoint_bytes)}{more} take "
            f"{format_bytes(self.needed_bytes)}"
        )


def checkpoint_space(
    folder: Path, retention: Checkpoint, *, checkpoint_bytes: int | None, written: int = 0
) -> CheckpointSpace | None:
    """Compare the room of a folder with what a run keeps there.

    Returns:
        None: the file system counts no blocks, as /proc.

    Raises:
        OSError: The file system does not answer.
    """
    there = nearest_folder(folder)
    if not os.statvfs(there).f_blocks:
        return None
    return CheckpointSpace(
        free_bytes=free_bytes_of(there),
        checkpoint_bytes=checkpoint_bytes,
        retained=retention.keep_last + retention.keep_best,
        written=written,
    )


def check_space(
    run_dir: Path, retention: Checkpoint, *, checkpoint_bytes: int, written: int
) -> str | None:
    """Warn where the checkpoints that a run keeps do not fit; None: they fit.

    Raises:
        StorageError: Not even one fits: all of the training would be lost.
    """
    try:
        room = checkpoint_space(
            run_dir, retention, checkpoint_bytes=checkpoint_bytes, written=written
        )
    except OSError:
        return None  # whoever writes there says so
    if room is None or not room.is_short:
        return None
    free = f"{nearest_folder(run_dir)} has {format_bytes(room.free_bytes)} free"
    if room.has_none:
        raise StorageError(
            f"{free}, and one checkpoint takes {format_bytes(checkpoint_bytes)}. Free some room, "
            "or choose another place with run.dir=FOLDER."
        )
    return (
        f"{free}, and {room.words}. Free some room, choose another place with run.dir=FOLDER, or "
        "lower checkpoint.keep_last."
    )


def lock_warning(folder: Path) -> str | None:
    """Return a warning for a folder without file locks; None if it has them."""
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
    """Check that files can be locked where runs will be; empty where they can."""
    warning = lock_warning(run_dir)
    if warning is None:
        return []
    what, _, mend = warning.partition(" Mount")
    return [
        Finding(name="file locks", verdict="warning", what=what.rstrip("."), mend=f"Mount{mend}")
    ]


def check_disk(
    run_dir: Path, retention: Checkpoint, *, checkpoint_bytes: int | None = None
) -> Finding:
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
    room = checkpoint_space(folder, retention, checkpoint_bytes=checkpoint_bytes)
    if room is None:
        return Finding(name="run folder", verdict="ok", what=f"{folder} can be written")
    return disk_finding(folder, room, bytes_per_s=speed)


def disk_finding(folder: Path, space: CheckpointSpace, *, bytes_per_s: float) -> Finding:
    """Whether the checkpoints fit, and can be written in reasonable time."""
    what = f"{folder}: {format_bytes(space.free_bytes)} free, writes {format_bytes(bytes_per_s)}/s"
    if space.is_short or space.free_bytes < GIB:
        return Finding(
            name="run folder", verdict="problem",
            what=what + (f", but {space.words}" if space.words else ""),
            mend="Free some, choose another place with run.dir, or lower checkpoint.keep_last.",
        )  # fmt: skip
    if not space.checkpoint_bytes:
        return Finding(name="run folder", verdict="ok", what=what)
    seconds = space.checkpoint_bytes / bytes_per_s
    size = format_bytes(space.checkpoint_bytes)
    what += f"; a checkpoint of {size} takes {format_seconds(seconds)}"
    if seconds > 600:
        return Finding(
            name="run folder", verdict="warning", what=what,
            mend=(
                "Training continues while it is written, but that much is lost with a machine. "
                "Use faster storage."
            ),
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
