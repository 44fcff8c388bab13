"""What `launch` says of the data: ready by a finished `prepare --on`, or what its making costs."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.load import load_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import ShardyardError
from shardyard.launchers.base import Launcher
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger
from shardyard.rundir.answers import read_answer
from shardyard.rundir.layout import RunDir, is_run
from shardyard.units import format_usd

MARK = "-prepare-"
"""In the name of each folder of `prepare --on`, between the run's name and the date."""

_NOT_OF_TOKENS = {
    "workers", "prefetch_steps", "seq_len", "attend_across_documents", "pack", "too_long",
    "loss_share",
}  # fmt: skip
"""Of ``data``: what changes nothing in the prepared files."""


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
        if answer is None or _wanted(asked) != _wanted(recipe):
            continue
        data = answer.result.get("data") or {}
        is_gone = launcher.capabilities.shares_folder and not Path(str(data.get("dir"))).is_dir()
        if isinstance(data.get("train_tokens"), int) and not is_gone:
            return Prepared(run_dir=run_dir, train_tokens=data["train_tokens"])
    return None


def _wanted(recipe: Recipe) -> tuple[object, ...]:
    """What two recipes share that need the same files in the same place."""
    launch, data = recipe.launch, recipe.data.model_dump(exclude=_NOT_OF_TOKENS)
    pods, region = launch.kubernetes, launch.aws_batch.region
    place = (pods.context, pods.namespace, region, launch.model_extra)
    return (recipe.run.dir, launch.volumes, *place, recipe.model, data)


def data_line(
    found: Prepared | None,
    words: Sequence[str],
    *,
    launcher: str,
    nodes: int,
    usd_per_hour: float | None,
) -> str:
    """What is told before a launch is agreed to.

    Args:
        words: The recipe, as it was given to `launch`.
        usd_per_hour: Of all nodes; None: not known.
    """
    if found is not None:
        return f"data: ready, {found.train_tokens:,} tokens, prepared by {found.run_dir.run_id}"
    who = "the accelerators wait" if nodes == 1 else f"the accelerators of all {nodes} nodes wait"
    price = "" if usd_per_hour is None else f", at {format_usd(usd_per_hour)} an hour"
    command = shlex.join(["shardyard", "prepare", *words, "--on", launcher])
    return (
        f"data: no finished job has prepared it there; what is missing node 0 prepares, and {who} "
        f"for it{price}. Without accelerators: {command}"
    )
