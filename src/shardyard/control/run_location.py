"""Place of a run's files: a folder that this machine sees, or only the nodes' storage."""

from dataclasses import dataclass
from pathlib import Path

from shardyard.config.schema.recipe import Recipe
from shardyard.control.job import LaunchedJob, fetch_progress, launched_of, reject_bench
from shardyard.control.submission import Launchers
from shardyard.errors import RequestError
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """A run that was found, and its other home, if it has one."""

    run_dir: RunDir
    """Here: what the launcher keeps."""
    folder: RunDir | None
    """Folder of its files, as this machine sees it; None: only the nodes see them."""
    launched: LaunchedJob | None
    """The newest training's job; None: it was trained here."""

    @property
    def remote(self) -> tuple[LaunchedJob, Recipe]:
        """Job whose nodes are the only ones to see the files, and its recipe."""
        assert self.folder is None and self.launched is not None
        return self.launched, self.launched.recipe()


def locate_run(run_dir: RunDir, launchers: Launchers | None) -> RunLocation:
    """Look where the files of a run are.

    Raises:
        RequestError: It is no training.
    """
    reject_bench(run_dir)
    if not Ledger(run_dir.ledger).jobs():
        return RunLocation(run_dir=run_dir, folder=run_dir, launched=None)
    launched = launched_of(run_dir, launchers)
    folder: RunDir | None = None
    if launched.launcher.capabilities.shares_folder:
        there = Path(nodes_folder(launched.recipe(), run_dir)).expanduser()
        if there.is_dir():
            folder = RunDir(there.resolve())
        elif run_dir.attempts():
            folder = run_dir
    return RunLocation(run_dir=run_dir, folder=folder, launched=launched)


def nodes_folder(recipe: Recipe, run_dir: RunDir) -> str:
    """The run's folder as its nodes see it."""
    return f"{recipe.run.dir.rstrip('/')}/{run_dir.run_id}"


def check_has_checkpoint(launched: LaunchedJob) -> None:
    """Raise where no checkpoint can exist yet, before a job is submitted for one.

    Raises:
        RequestError: The run has not saved yet, and continues.
    """
    state = launched.status().state
    if state.is_over:
        return  # what its log said may be gone with its pods: the folder itself is asked
    if state is not JobState.WAITING:
        fetch_progress(launched)
    events = read_lines(launched.run_dir.events)
    if not any(event.get("kind") == "checkpoint_durable" for event in events):
        raise RequestError(
            f"run {launched.run_dir.run_id} has no checkpoint yet and its job is {state.value}: "
            "one is written every checkpoint.every steps and at the end. Follow it with `shardyard "
            f"watch {launched.run_dir.handle}`, or let it save now and end: `shardyard cancel "
            f"{launched.run_dir.handle}`."
        )
