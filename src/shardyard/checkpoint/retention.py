"""Which checkpoints stay: the newest, the best, and nothing half removed.

A folder is renamed before it is emptied, so a kill leaves either a whole checkpoint or one whose
name no reader takes for a checkpoint. Only rank 0 changes anything.
"""

import shutil
from collections.abc import Collection
from pathlib import Path

from shardyard.errors import StorageError
from shardyard.files import flush_folder, write_text
from shardyard.rundir.layout import REPLACED, RunDir, step_of_name

SET_ASIDE = ".damaged"
"""Ending of a checkpoint that was found damaged when the run was resumed."""


_SHOWN_BYTES = 40


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
    return [step for step in steps if step_name(step) + ending in names]


def read_pointer(checkpoints_dir: Path, name: str) -> int | None:
    """Step that ``latest`` or ``best`` names; None if it cannot be read or names nothing."""
    try:
        target = (checkpoints_dir / name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
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
        held = pointer.read_bytes()[:_SHOWN_BYTES]
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return f"{name} names no checkpoint that is there: {_shown(held)}"


def _shown(held: bytes) -> str:
    """What a pointer holds, in words: a checkpoint's name, or other content quoted."""
    text = held.decode(errors="replace").strip()
    if not text.strip("\0 "):
        return "it is empty"
    if step_of_name(text) is not None:
        return f"{text} is gone"
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return f"it holds '{shown}'"


def prune(checkpoints_dir: Path, keep_last: int, *, keep: Collection[int] = ()) -> list[int]:
    """Remove old checkpoints and return their steps.

    Kept are the ``keep_last`` newest up to ``latest``, what ``best`` names, and ``keep``. Without
    a ``latest`` nothing is removed. A checkpoint that was set aside, damaged or replaced, goes once
    the run has a durable one as far on.

    Raises:
        StorageError: A folder cannot be removed.
    """
    latest = read_pointer(checkpoints_dir, "latest")
    if latest is None:
        return []
    passed = [step for step in complete_steps(checkpoints_dir) if step <= latest]
    protected = {*passed[-keep_last:], read_pointer(checkpoints_dir, "best"), *keep}
    removed = [step for step in passed if step not in protected]
    aside = [
        step_name(step) + ending
        for ending in (SET_ASIDE, REPLACED)
        for step in complete_steps(checkpoints_dir, ending)
        if step <= latest
    ]
    try:
        for step in removed:
            remove(checkpoints_dir / step_name(step))
        for name in aside:
            remove(checkpoints_dir / name)
    except OSError as error:
        raise StorageError(
            f"{error.filename or checkpoints_dir} cannot be removed: {error.strerror}. It belongs "
            "to an old checkpoint; kept, such folders would fill the disk. The checkpoint of step "
            f"{latest} is intact: check who owns the folder, then resume the run."
        ) from error
    return removed


def set_aside(checkpoints_dir: Path, step: int) -> None:
    """Rename a damaged checkpoint, so that it is neither counted nor tried again.

    Raises:
        OSError: The file system refused.
    """
    folder = checkpoints_dir / step_name(step)
    aside = folder.with_name(folder.name + SET_ASIDE)
    if aside.exists():
        remove(aside)
    folder.rename(aside)
    flush_folder(checkpoints_dir)


def remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill in between cannot leave a part that looks whole.

    Raises:
        OSError: The file system refused.
    """
    doomed = folder.with_name(f"{folder.name}.removed.tmp")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(checkpoints_dir: Path) -> None:
    """Remove what a killed save or a killed removal left behind.

    Raises:
        OSError: The file system refused.
    """
    for folder in checkpoints_dir.glob("step-*.tmp"):
        shutil.rmtree(folder)
