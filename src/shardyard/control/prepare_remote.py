"""Prepare data on the cluster as a side job, and report whether it is ready there."""

import hashlib
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.aux_jobs import SideTerms, find_side_job, run_side_job, side_request
from shardyard.control.request import Request
from shardyard.control.submission import for_nodes, recipe_on_nodes
from shardyard.doctor.finding import Finding
from shardyard.errors import ShardyardError
from shardyard.launchers.base import Launcher, SideJob
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger
from shardyard.rundir.contracts import read_answer
from shardyard.rundir.layout import RunDir, is_run, new_run_id
from shardyard.units import format_usd

MARK = "-prepare-"
"""In the name of each folder of `prepare --on`, between the run's name and the date."""

_NOT_OF_TOKENS = {
    "workers", "prefetch_steps", "seq_len", "attend_across_documents", "pack", "too_long",
    "loss_share",
}  # fmt: skip
"""Settings of ``data`` that leave the prepared files unchanged."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A finished `prepare --on`."""

    run_dir: RunDir
    train_tokens: int


def prepare_folders(parent: Path, name: str = "*") -> Iterator[tuple[RunDir, Ledger]]:
    """Folders of `prepare --on`, the newest first: their names end with the date.

    Args:
        parent: Of the runs' folders, here.
        name: Of the run.
    """
    folders = [each for each in parent.glob(f"{name}{MARK}*") if is_run(each)]
    for folder in sorted(folders, key=lambda each: each.name.rpartition(MARK)[2], reverse=True):
        run_dir = RunDir(folder)
        yield run_dir, Ledger(run_dir.ledger)


def find_prepared(parent: Path, launcher: Launcher, recipe: Recipe) -> Prepared | None:
    """The newest finished one of the same target, volumes, model and data.

    Args:
        parent: As of ``prepare_folders``.
        recipe: As the nodes read it.
    """
    for run_dir, ledger in prepare_folders(parent):
        try:
            jobs = [job for job in ledger.side_jobs() if job.launcher == launcher.name]
            asked = load_recipe([run_dir.recipe])
        except ShardyardError:
            continue  # of another version, or damaged: nothing is known of it
        answer = read_answer(run_dir, jobs[-1].details[SIDE_DETAIL]) if jobs else None
        if answer is None or _data_key(asked) != _data_key(recipe):
            continue
        data = answer.result.get("data") or {}
        is_gone = launcher.capabilities.shares_folder and not Path(str(data.get("dir"))).is_dir()
        if isinstance(data.get("train_tokens"), int) and not is_gone:
            return Prepared(run_dir=run_dir, train_tokens=data["train_tokens"])
    return None


def _data_key(recipe: Recipe) -> tuple[object, ...]:
    """Return what two recipes share that need the same files on the same target."""
    launch, data = recipe.launch, recipe.data.model_dump(exclude=_NOT_OF_TOKENS)
    pods, region = launch.kubernetes, launch.aws_batch.region
    target = (pods.context, pods.namespace, region, launch.model_extra)
    return (recipe.run.dir, launch.volumes, *target, recipe.model, data)


def data_line(
    prepared: Prepared | None,
    words: Sequence[str],
    *,
    launcher: str,
    nodes: int,
    usd_per_hour: float | None,
) -> str:
    """Return the line on the data that is shown before a launch is confirmed.

    Args:
        words: The recipe, as it was given to `launch`.
        usd_per_hour: Price of all nodes; None: not known.
    """
    if prepared is not None:
        return (
            f"data: ready, {prepared.train_tokens:,} tokens, prepared by {prepared.run_dir.run_id}"
        )
    who = "the accelerators wait" if nodes == 1 else f"the accelerators of all {nodes} nodes wait"
    price = "" if usd_per_hour is None else f", at {format_usd(usd_per_hour)} an hour"
    command = shlex.join(["shardyard", "prepare", *words, "--on", launcher])
    return (
        f"data: no finished job has prepared it there; what is missing node 0 prepares, and {who} "
        f"for it{price}. Without accelerators: {command}"
    )


# `shardyard prepare RECIPE --on LAUNCHER`: model and data onto the nodes' storage, as a side job.
#
# Node 0 of a training would do the same while all accelerators wait. What was done is known by the
# answer in the side job's folder, from which `launch` says that the data is ready.


def prepare_on(
    request: Request, launcher: Launcher, terms: SideTerms, *, verify: bool
) -> tuple[RunDir, dict[str, Any]] | None:
    """Prepare a request's model and data on a node of a launcher.

    Returns:
        The side job's folder and its answer; None: with ``dry_run`` no job was submitted.

    Raises:
        ShardyardError: The side job's error, or why it cannot be submitted.
    """
    shares_folder = launcher.capabilities.shares_folder
    preview = request.preview()
    seen = recipe_on_nodes(request, launcher)
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
    run_dir = _existing_prepare_folder(parent, name, launcher, side) or RunDir(
        parent / new_run_id(f"{name}-prepare")
    )
    recipe = for_nodes(seen, preview, run_dir, devices=None)
    asked = side_request(run_dir, launcher, side, recipe=recipe)
    answer = run_side_job(run_dir, launcher, asked, terms)
    return None if answer is None else (run_dir, answer)


def _existing_prepare_folder(
    parent: Path, name: str, launcher: Launcher, side: SideJob
) -> RunDir | None:
    """The newest folder in which the same was asked before, whether it came to an end or not."""
    for run_dir, ledger in prepare_folders(parent, name):
        lines = [*ledger.side_jobs(), *ledger.live()]
        if any(
            (line.launcher, line.details.get(SIDE_DETAIL)) == (launcher.name, side.label)
            for line in lines
        ):
            return run_dir
    return None


# What a node finds at the recipe's paths: asked by a side job, of which nothing stays.

_MARK = "-probe-"


def probe_on(request: Request, launcher: Launcher, terms: SideTerms) -> list[Finding] | None:
    """Send a probe, or find the one that an earlier command sent; remove it once it answered.

    Returns:
        What it found; None: with ``dry_run`` no job was submitted.

    Raises:
        ShardyardError: It could not be submitted, or ended without an answer.
    """
    preview = request.preview()
    parent, name = Path(request.recipe.run.dir).expanduser().resolve(), str(preview.recipe.run.name)
    sight = launcher.node_paths(request.recipe)
    side = SideJob(
        kind="probe",
        arguments={
            "shares_folder": launcher.capabilities.shares_folder,
            "checkpoint_bytes": request.checkpoint_bytes,
            "mounts": [] if sight.shares_filesystem else list(sight.folders),
        },
    )
    run_dir = _existing_probe_folder(parent, name, launcher, side) or RunDir(
        parent / new_run_id(name + "-probe")
    )
    recipe = for_nodes(recipe_on_nodes(request, launcher), preview, run_dir, devices=None)
    asked = side_request(run_dir, launcher, side, recipe=recipe)
    answer = run_side_job(run_dir, launcher, asked, terms)
    if answer is None:
        return None
    _clear(run_dir, launcher, side)
    return [Finding(**finding) for finding in answer["findings"]]


def _existing_probe_folder(
    parent: Path, name: str, launcher: Launcher, side: SideJob
) -> RunDir | None:
    """The folder of a probe whose command was killed."""
    for folder in sorted(parent.glob(f"{name}{_MARK}*"), reverse=True):
        run_dir = RunDir(folder)
        if run_dir.exists and find_side_job(run_dir, launcher, side) is not None:
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
