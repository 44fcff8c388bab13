"""`shardyard prepare RECIPE --on LAUNCHER`: model and data onto the nodes' storage, as a side job.

Node 0 of a training would do the same while all accelerators wait. What was done is known by the
answer in the side job's folder, from which `launch` says that the data is ready (prepared.py).
"""

import hashlib
from pathlib import Path
from typing import Any

from shardyard.config.load import dump_recipe
from shardyard.control.aux_jobs import SideTerms, run_side_job, side_request
from shardyard.control.prepared import prepare_folders
from shardyard.control.request import Request
from shardyard.control.submission import for_nodes, read_there
from shardyard.launchers.base import Launcher, SideJob
from shardyard.launchers.ledger import SIDE_DETAIL
from shardyard.rundir.layout import RunDir, new_run_id


def prepare_on(
    request: Request, launcher: Launcher, terms: SideTerms, *, verify: bool
) -> tuple[RunDir, dict[str, Any]] | None:
    """Prepare a request's model and data on a node of a launcher.

    Returns:
        The side job's folder and its answer; None: with ``dry_run`` nothing was submitted.

    Raises:
        ShardyardError: What the side job answered, or why it cannot be submitted.
    """
    shares_folder = launcher.capabilities.shares_folder
    preview = request.preview()
    seen = read_there(request, launcher)
    parent, name = Path(request.recipe.run.dir).expanduser().resolve(), str(preview.recipe.run.name)
    nowhere = for_nodes(seen, preview, RunDir(parent / "any"), devices=None)
    side = SideJob(
        kind="prepare",
        arguments={
            "recipe": hashlib.sha256(dump_recipe(nowhere).encode()).hexdigest()[:16],
            "on": launcher.name,
            "is_this_machine": launcher.capabilities.is_this_machine,
            "shares_folder": shares_folder,
            "verify": verify,
        },
    )
    run_dir = _begun(parent, name, launcher, side) or RunDir(parent / new_run_id(f"{name}-prepare"))
    recipe = for_nodes(seen, preview, run_dir, devices=None)
    asked = side_request(run_dir, launcher, side, recipe=recipe)
    answer = run_side_job(run_dir, launcher, asked, terms)
    return None if answer is None else (run_dir, answer)


def _begun(parent: Path, name: str, launcher: Launcher, side: SideJob) -> RunDir | None:
    """The newest folder in which the same was asked before, whether it came to an end or not."""
    for run_dir, ledger in prepare_folders(parent, name):
        lines = [*ledger.side_jobs(), *ledger.live()]
        if any(
            (line.launcher, line.details.get(SIDE_DETAIL)) == (launcher.name, side.label)
            for line in lines
        ):
            return run_dir
    return None
