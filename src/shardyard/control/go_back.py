"""Going back to an earlier checkpoint of a run: after a loss spike, for example.

Newer checkpoints are renamed to ``step-N.replaced``, so that every reader takes the earlier one for
the newest. They are removed once the run has a durable checkpoint as far on.
"""

import shutil
from pathlib import Path

from shardyard.config.resolved import RollbackTarget
from shardyard.errors import RequestError, StorageError
from shardyard.io.files import flush_folder, write_text
from shardyard.rundir.layout import REPLACED, RunDir


def check_step_exists(run_dir: RunDir, back_to: RollbackTarget) -> None:
    """Raise if there is no whole checkpoint of the step.

    Raises:
        RequestError: There is none.
    """
    steps = run_dir.checkpoint_steps()
    if back_to.step in steps:
        return
    there = ", ".join(map(str, steps)) or "none"
    raise RequestError(
        f"--step {back_to.step}: run {run_dir.run_id} has no such checkpoint. It has those of "
        f"steps {there}. checkpoint.keep_last says how many are kept."
    )


def go_back(run_dir: RunDir, back_to: RollbackTarget) -> list[int]:
    """Put the checkpoints after a step aside; returns their steps. The caller holds the lease.

    Raises:
        StorageError: A checkpoint cannot be renamed.
    """
    newer = [step for step in run_dir.checkpoint_steps() if step > back_to.step]
    try:
        for step in reversed(newer):  # a kill in between leaves the older ones in use
            _put_aside(run_dir.checkpoint(step))
        write_text(run_dir.latest, run_dir.checkpoint(back_to.step).name + "\n")
        flush_folder(run_dir.checkpoints)
    except OSError as error:
        raise StorageError(
            f"{error.filename} cannot be renamed: {error.strerror}. Nothing was trained. Check "
            "that the folder is yours and can be written."
        ) from error
    return newer


def _put_aside(folder: Path) -> None:
    """In place of one that was put aside before."""
    aside = folder.with_name(folder.name + REPLACED)
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
