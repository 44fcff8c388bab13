"""The user's own code on its way to the nodes: packed at submission, importable on each node.

It is kept in the run's folder, where a resume finds it, and nodes too if they share that; launchers
whose nodes do not carry it themselves.
"""

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import DataError, RequestError
from shardyard.io.files import read_json_object, write_json
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.bundle import (
    Bundle,
    bundle,
    damaged_files,
    recheck_bundle,
    unpack,
    write_bundle,
)
from shardyard.log import warn
from shardyard.rundir.layout import RunDir


def packed_code(
    recipe: Recipe, recipe_text: str, run_dir: RunDir, *, is_resume: bool
) -> Bundle | None:
    """Pack what launch.code lists, or return None. A resume runs the code that was launched.

    Raises:
        RequestError: launch.code names no files, too much, or files that hold credentials.
        DataError: The launched code, which a resume needs, is missing or damaged.
    """
    listed = list(recipe.launch.code)
    if not listed:
        return None
    note = _note(run_dir) if is_resume else {}
    if note.get("code") != listed:
        return bundle(listed, recipe_text)
    return _load_launched_code(run_dir, note, listed)


def _load_launched_code(run_dir: RunDir, note: Mapping[str, Any], listed: list[str]) -> Bundle:
    """The code that was launched: from the run's folder, or packed again if it is the same.

    Raises:
        DataError: It is neither in the run's folder nor here.
    """
    path, digest = _archive_of(run_dir, note)
    try:
        found = recheck_bundle(path, digest=digest)
    except DataError as error:
        return _repack(run_dir, listed, digest, str(error))
    except RequestError as error:
        file = _note_file(run_dir)
        raise RequestError(
            f"{error} The code is that of {path}, which an earlier version packed. Remove the note "
            f"on it, and the resume takes the code that is here: rm {shlex.quote(str(file))}"
        ) from error
    folder = _unpacked(run_dir, digest)
    if (folder / "recipe.yaml").is_file():
        _check_unchanged(path, folder, digest)
    if found.excluded_files:
        warn(
            f"{path}, which an earlier version packed, holds private files. They are not sent "
            f"again, but are still there: rm -r {shlex.quote(str(path))} {shlex.quote(str(folder))}"
        )
    return found


def _repack(run_dir: RunDir, listed: list[str], digest: str, problem: str) -> Bundle:
    """The launched code out of this folder, where the archive is lost."""
    with suppress(OSError, RequestError, UnicodeDecodeError):
        made = bundle(listed, run_dir.recipe.read_text(encoding="utf-8"))
        if made.digest == digest:
            return made
    note = _note_file(run_dir)
    raise DataError(
        f"{problem.partition('. Launch again')[0]}. The code in {Path.cwd()} is not the code that "
        "was launched either. Resume in a folder with that code; or remove "
        f"{note}, and the resume takes the code that is here: rm {shlex.quote(str(note))}"
    )


def describe_code(code: Bundle | None, *, in_full: bool) -> list[str]:
    """Lines that say what launch.code sends and what it leaves out.

    Args:
        in_full: Name every file that is sent, and not only the first.
    """
    if code is None:
        return []
    shown = code.names if in_full else code.names[:5]
    more = len(code.names) - len(shown)
    count = f"{len(code.names):,} file{'s' * (len(code.names) != 1)}"
    names = ", ".join(shown) + (f" and {more:,} more" if more else "")
    lines = [f"code: {count} sent: {names}"]
    return lines + [f"code: not sent: {name}: {why}" for name, why in code.excluded_files.items()]


def send_code(request: LaunchRequest, run_dir: RunDir) -> None:
    """Keep the packed code in the run's folder.

    Raises:
        StorageError: The folder cannot be written.
    """
    code = request.code
    if code is None:
        return
    path = write_bundle(code, run_dir.path / "launch")
    listed = list(request.recipe.launch.code)
    note = {"code": listed, "file": path.name, "digest": code.digest, "files": code.files}
    write_json(_note_file(run_dir), note)


def take_code(recipe: Recipe, run_dir: RunDir, sent: Path | None = None) -> Path | None:
    """On a node: unpack what was sent, and let this node's processes import it.

    Args:
        sent: The archive, named by its digest, where it is not in the run's folder.

    Returns:
        The folder of the code; None: launch.code is not set.

    Raises:
        DataError: It was damaged on its way.
    """
    if not recipe.launch.code:
        return None
    if sent is None:
        sent, digest = _sent(run_dir)
    else:
        digest = sent.name.partition(".")[0]
    folder = _unpacked(run_dir, digest)
    if not (folder / "recipe.yaml").is_file():  # unpacked last
        unpack(sent, folder, digest=digest)
    _check_unchanged(sent, folder, digest)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "code"), *([known] if known else [])])
    return folder / "code"


def _unpacked(run_dir: RunDir, digest: str) -> Path:
    """Folder into which nodes unpack the archive."""
    return run_dir.path / "launch" / f"code-{digest[:16]}"


def _check_unchanged(sent: Path, folder: Path, digest: str) -> None:
    """Compare unpacked code with what was packed: another process may have changed it since."""
    wrong = damaged_files(sent, folder, digest=digest)
    if not wrong:
        return
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    raise DataError(
        f"the code in {folder} is not the code that was launched: {shown} changed. Remove "
        f"the folder, and it is unpacked again: rm -r {shlex.quote(str(folder))}"
    )


def _sent(run_dir: RunDir) -> tuple[Path, str]:
    """Archive in the run's folder, and digest."""
    note = _note(run_dir)
    if not note:
        raise DataError(
            f"{_note_file(run_dir)} is missing or damaged, which says what launch.code was packed "
            "into. Launch again with `shardyard launch` or `shardyard resume`, which write it."
        )
    return _archive_of(run_dir, note)


def _archive_of(run_dir: RunDir, note: Mapping[str, Any]) -> tuple[Path, str]:
    """Archive and digest that a note names."""
    file, digest = str(note.get("file")), str(note.get("digest"))
    if not re.fullmatch(r"bundle-[0-9a-f]{16}\.tar\.gz", file) or not file.startswith(
        f"bundle-{digest[:16]}."
    ):
        raise DataError(f"{_note_file(run_dir)} is damaged: it names no archive of launch.code.")
    return run_dir.path / "launch" / file, digest


def _note_file(run_dir: RunDir) -> Path:
    return run_dir.path / "launch" / "code.json"


def _note(run_dir: RunDir) -> dict[str, Any]:
    try:
        return read_json_object(_note_file(run_dir))
    except (OSError, ValueError):
        return {}
