"""The user's own code on its way to the nodes: packed at submission, importable on each node.

It is kept in the run's folder, where a resume finds it, and nodes too if they share that; launchers
whose nodes do not carry it themselves.
"""

import json
import os
from pathlib import Path

from shardyard.config.schema import Recipe
from shardyard.errors import DataError
from shardyard.files import write_json
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.bundle import Bundle, bundle, unpack, write_bundle
from shardyard.rundir.layout import RunDir


def packed_code(
    recipe: Recipe, recipe_text: str, run_dir: RunDir, *, is_resume: bool
) -> Bundle | None:
    """What launch.code lists, or None. A resume runs the code that was launched.

    Raises:
        RequestError: launch.code names nothing, or too much.
    """
    listed = list(recipe.launch.code)
    if not listed:
        return None
    note = _note(run_dir) if is_resume else {}
    kept = run_dir.path / "launch" / str(note.get("file"))
    if note.get("code") == listed and kept.is_file():
        files = note["files"]
        assert isinstance(files, int)
        return Bundle(digest=str(note["digest"]), archive=kept.read_bytes(), files=files)
    return bundle(listed, recipe_text)


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


def take_code(recipe: Recipe, run_dir: RunDir, sent: Path | None = None) -> None:
    """On a node: unpack what was sent, and let this node's processes import it.

    Args:
        sent: The archive, named by its digest, where it is not in the run's folder.

    Raises:
        DataError: It was damaged on its way.
    """
    if not recipe.launch.code:
        return
    digest, sent = _sent(run_dir) if sent is None else (sent.name.partition(".")[0], sent)
    folder = run_dir.path / "launch" / f"code-{digest[:16]}"
    if not (folder / "recipe.yaml").is_file():  # unpacked last
        unpack(sent, folder, digest=digest)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "code"), *([known] if known else [])])


def _sent(run_dir: RunDir) -> tuple[str, Path]:
    """Digest and archive in the run's folder."""
    note = _note(run_dir)
    if not note:
        raise DataError(
            f"{_note_file(run_dir)} is missing, which says what launch.code was packed into. "
            "Launch again with `shardyard launch` or `shardyard resume`, which write it."
        )
    return str(note["digest"]), run_dir.path / "launch" / str(note["file"])


def _note_file(run_dir: RunDir) -> Path:
    return run_dir.path / "launch" / "code.json"


def _note(run_dir: RunDir) -> dict[str, object]:
    try:
        content = json.loads(_note_file(run_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
