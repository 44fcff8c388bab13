"""Retention of checkpoints: keep the newest and the best, and leave no half-removed one.

A folder is renamed before it is emptied. A kill therefore leaves either a whole checkpoint or a
folder whose name no reader takes for a checkpoint. Only rank 0 changes anything.
"""

import itertools
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardyard.errors import StorageError
from shardyard.io.files import flush_folder, read_plain, write_text
from shardyard.rundir.layout import REPLACED, RunDir, step_of_name

SET_ASIDE = ".damaged"
"""Ending of a checkpoint that was found damaged when the run was resumed."""


_SHOWN_BYTES = 40
_MOST_POINTER_BYTES = 4096


def step_name(step: int) -> str:
    """Name of a checkpoint's folder."""
    return RunDir(Path()).checkpoint(step).name


def complete_steps(checkpoints_dir: Path, ending: str = "") -> list[int]:
    """Steps whose folder has its final name (and ``ending``), oldest first."""
    if not checkpoints_dir.is_dir():
        return []
    names = {entry.name for entry in checkpoints_dir.iterdir()}
    numbers = (name.removeprefix("step-").removesuffix(ending) for name in names)
    steps = sorted({int(number) for number in numbers if number.isdecimal()})
    # int() reads "7" and "00000007" alike. Only the name that a save gives counts.
    return [step for step in steps if step_name(step) + ending in names]


def read_pointer(checkpoints_dir: Path, name: str) -> int | None:
    """Return the step that ``latest`` or ``best`` names; None without a readable one."""
    try:
        pointer = checkpoints_dir / name
        target = read_plain(pointer, limit_bytes=_MOST_POINTER_BYTES).decode().strip()
    except (OSError, StorageError, UnicodeDecodeError):
        return None
    # Whatever the file holds is only compared with names, and never used as a path.
    by_name = {step_name(step): step for step in complete_steps(checkpoints_dir)}
    return by_name.get(target)


def mark_latest(checkpoints_dir: Path, step: int) -> None:
    """Make ``latest`` name a durable checkpoint.

    Raises:
        StorageError: The folder cannot be written.
    """
    _mark(checkpoints_dir / "latest", step)


def mark_best(checkpoints_dir: Path, step: int) -> None:
    """Make ``best`` name a durable checkpoint; retention keeps it.

    Raises:
        StorageError: The folder cannot be written.
    """
    _mark(checkpoints_dir / "best", step)


def _mark(pointer: Path, step: int) -> None:
    if pointer.is_dir() and not pointer.is_symlink():
        _move_away(pointer)
    write_text(pointer, step_name(step) + "\n")


def _move_away(folder: Path) -> None:
    """A folder where a pointer belongs is somebody's: it is kept under a name that is free."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}{SET_ASIDE}-{number}")).exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError as error:
        raise StorageError(
            f"{folder} is a folder where a file belongs that names a checkpoint, and cannot be "
            f"renamed: {error.strerror}. Move it away yourself, then resume the run."
        ) from error


def pointer_problem(checkpoints_dir: Path, name: str) -> str | None:
    """Why ``latest`` or ``best`` cannot be followed; None if it can, or is not there."""
    pointer = checkpoints_dir / name
    if pointer.is_dir():
        return f"{name} is a folder and no file that names a checkpoint"
    if not pointer.exists() or read_pointer(checkpoints_dir, name) is not None:
        return None
    try:
        held = read_plain(pointer, limit_bytes=_MOST_POINTER_BYTES)[:_SHOWN_BYTES]
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except StorageError as error:
        return f"{error}".removeprefix(f"{pointer.parent}/").removesuffix(".")
    return f"{name} names no checkpoint that is there: {_describe_pointer(held)}"


def _describe_pointer(content: bytes) -> str:
    """Describe a pointer's content: a checkpoint's name, or other content quoted."""
    text = content.decode(errors="replace").strip()
    if not text.strip("\0 "):
        return "it is empty"
    if step_of_name(text) is not None:
        return f"{text} is gone"
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return f"it holds '{shown}'"


@dataclass(frozen=True)
class Pruned:
    """Result of a removal of old checkpoints."""

    steps: list[int]
    """Steps of the checkpoints that were to go."""
    not_removed: str | None
    """Why some folders are still there, and what to do; None: all are gone."""


def prune(checkpoints_dir: Path, keep_last: int, *, keep: Collection[int] = ()) -> Pruned:
    """Remove old checkpoints.

    Kept are the ``keep_last`` newest up to ``latest``, the one that ``best`` names, and ``keep``.
    Without a ``latest``, none is removed. A checkpoint that was set aside, damaged or replaced,
    goes once the run has a durable one as far on. A failed removal is tried again with the next
    checkpoint: the newest one is durable, so training continues.
    """
    latest = read_pointer(checkpoints_dir, "latest")
    if latest is None:
        return Pruned([], None)
    # A newer folder was cut off just before its pointer. A resume may continue from it.
    passed = [step for step in complete_steps(checkpoints_dir) if step <= latest]
    protected = {*passed[-keep_last:], read_pointer(checkpoints_dir, "best"), *keep}
    removed = [step for step in passed if step not in protected]
    aside = [
        step_name(step) + ending
        for ending in (SET_ASIDE, REPLACED)
        for step in complete_steps(checkpoints_dir, ending)
        if step <= latest
    ]
    names = [*map(step_name, removed), *aside]
    failures = [_try_to_remove(checkpoints_dir / name) for name in names]
    words = "; ".join(filter(None, failures))
    if not words:
        return Pruned(removed, None)
    return Pruned(
        removed,
        f"{words}. Training continues, and the next checkpoint tries again; kept, such folders "
        "fill the disk. Check who owns the folder and which process uses it (`lsof +D FOLDER`).",
    )


def _try_to_remove(folder: Path) -> str | None:
    """Remove a checkpoint; why it is still there, None: it is gone."""
    try:
        remove(folder)
    except OSError as error:
        return f"{error.filename or folder} cannot be removed: {error.strerror or error}"
    return None


def set_aside(checkpoints_dir: Path, step: int) -> None:
    """Rename a damaged checkpoint, so that it is neither counted nor tried again.

    Raises:
        OSError: It cannot be renamed.
    """
    folder = checkpoints_dir / step_name(step)
    aside = folder.with_name(folder.name + SET_ASIDE)
    # lexists() also sees a dangling link, which has the name as well.
    if os.path.lexists(aside):
        clear(aside)
    folder.rename(aside)
    flush_folder(checkpoints_dir)


def remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill in between cannot leave a part that looks whole.

    Of a link, as to a checkpoint that was moved to another disk, only the link goes.

    Raises:
        OSError: It cannot be removed. The name may be free all the same.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    # An earlier removal that stopped half-way may still have the name.
    names = (f"{folder.name}.removed{number or ''}.tmp" for number in itertools.count())
    doomed = next(each for each in map(folder.with_name, names) if not os.path.lexists(each))
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear(folder: Path) -> None:
    """Free the name of a checkpoint; what cannot be removed now, the next save removes.

    Raises:
        OSError: The name cannot be freed.
    """
    try:
        remove(folder)
    except OSError:
        if os.path.lexists(folder):
            raise


def remove_leftovers(checkpoints_dir: Path) -> None:
    """Remove what a killed save or an unfinished removal left behind, as far as that works."""
    for left in checkpoints_dir.glob("step-*.tmp"):
        # NFS keeps the files that a process has open (ENOTEMPTY). The next save tries again.
        with suppress(OSError):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
