"""The user's own code on its way to the nodes: packed at submission, importable on each node.

It travels in the run's folder, so nodes must see that; where they do not, it belongs in the image.
"""

import json
import os
from pathlib import Path

from shardyard.config.schema import Recipe
from shardyard.errors import DataError, RequestError
from shardyard.launch.base import Launcher, LaunchRequest
from shardyard.launch.bundle import bundle, unpack
from shardyard.rundir.layout import RunDir, write_json


def refuse_unsendable(recipe: Recipe, launcher: Launcher) -> None:
    """Raise if there is code and no way to the nodes.

    Raises:
        RequestError: The launcher's nodes do not see the run's folder.
    """
    if recipe.launch.code and not launcher.capabilities.shares_folder:
        raise RequestError(
            f"launch.code={list(recipe.launch.code)}: code travels in the run's folder, which the "
            f"nodes of {launcher.name} do not share with this machine. Put it into the image "
            "(FROM the one that `shardyard image build` makes, COPY it, set PYTHONPATH)."
        )


def send_code(request: LaunchRequest, run_dir: RunDir) -> None:
    """Pack launch.code into the run's folder. A resume runs the code that was launched.

    Raises:
        RequestError: launch.code names nothing, or too much.
        StorageError: The folder cannot be written.
    """
    listed = list(request.recipe.launch.code)
    if not listed or (request.is_resume and _note(run_dir).get("code") == listed):
        return
    made = bundle(request, run_dir.path / "launch")
    note = {"code": listed, "file": made.path.name, "digest": made.digest, "files": made.files}
    write_json(_note_file(run_dir), note)


def take_code(recipe: Recipe, run_dir: RunDir) -> None:
    """On a node: unpack what was sent, and let this node's processes import it.

    Raises:
        DataError: It was damaged on its way.
    """
    if not recipe.launch.code:
        return
    note = _note(run_dir)
    if not note:
        raise DataError(
            f"{_note_file(run_dir)} is missing, which says what launch.code was packed into. "
            "Launch again with `shardyard launch` or `shardyard resume`, which write it."
        )
    digest = str(note["digest"])
    folder = run_dir.path / "launch" / f"code-{digest[:16]}"
    if not (folder / "recipe.yaml").is_file():  # unpacked last
        unpack(run_dir.path / "launch" / str(note["file"]), folder, digest=digest)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "code"), *([known] if known else [])])


def _note_file(run_dir: RunDir) -> Path:
    return run_dir.path / "launch" / "code.json"


def _note(run_dir: RunDir) -> dict[str, object]:
    try:
        content = json.loads(_note_file(run_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
