"""What a node finds at the recipe's paths: asked by a side job, of which nothing stays."""

import shutil
from pathlib import Path

from shardyard.control.aux_jobs import SideTerms, find_side_job, run_side_job, side_request
from shardyard.control.request import Request
from shardyard.control.submission import for_nodes, read_there
from shardyard.doctor.finding import Finding
from shardyard.launchers.base import Launcher, SideJob
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir, new_run_id

_MARK = "-probe-"


def probe_on(request: Request, launcher: Launcher, terms: SideTerms) -> list[Finding] | None:
    """Send a probe, or find the one that a command before has sent; remove it once it answered.

    Returns:
        What it found; None: with ``dry_run`` nothing was submitted.

    Raises:
        ShardyardError: It could not be submitted, or ended without an answer.
    """
    preview = request.preview()
    parent, name = Path(request.recipe.run.dir).expanduser().resolve(), str(preview.recipe.run.name)
    sight = launcher.sees(request.recipe)
    side = SideJob(
        kind="probe",
        arguments={
            "shares_folder": launcher.capabilities.shares_folder,
            "checkpoint_bytes": request.checkpoint_bytes,
            "mounts": [] if sight.sees_this_machine else list(sight.folders),
        },
    )
    run_dir = _begun(parent, name, launcher, side) or RunDir(parent / new_run_id(name + "-probe"))
    recipe = for_nodes(read_there(request, launcher), preview, run_dir, devices=None)
    asked = side_request(run_dir, launcher, side, recipe=recipe)
    answer = run_side_job(run_dir, launcher, asked, terms)
    if answer is None:
        return None
    _clear(run_dir, launcher, side)
    return [Finding(**finding) for finding in answer["findings"]]


def _begun(parent: Path, name: str, launcher: Launcher, side: SideJob) -> RunDir | None:
    """The folder of a probe whose command was killed."""
    for folder in sorted(parent.glob(f"{name}{_MARK}*"), reverse=True):
        run_dir = RunDir(folder)
        if run_dir.is_there and find_side_job(run_dir, launcher, side) is not None:
            return run_dir
    return None


def _clear(run_dir: RunDir, launcher: Launcher, side: SideJob) -> None:
    """Remove what the probe was, from the scheduler and from here."""
    found = find_side_job(run_dir, launcher, side)
    ledger = Ledger(run_dir.ledger)
    if found is not None:
        launcher.remove(found.submission, ledger)
    if not ledger.live():
        shutil.rmtree(run_dir.path, ignore_errors=True)
