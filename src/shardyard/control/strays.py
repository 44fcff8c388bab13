"""Jobs of ours that a scheduler has and that no run of a folder knows: they may cost money.

A folder that was moved, renamed or deleted takes its ledger along. What is left are the marks that
each submission gives its job: a comment on Slurm, labels on Kubernetes, tags on AWS Batch.
"""

from collections.abc import Sequence
from pathlib import Path

from shardyard.config.load import load_recipe
from shardyard.errors import RequestError
from shardyard.launchers.base import FindsJobs, FoundJob, Launcher
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir


def strays(launcher: Launcher, overrides: Sequence[str], known_in: Path) -> list[FoundJob]:
    """Jobs that are not over and stand in no ledger of a folder of runs.

    Args:
        overrides: ``launch...=value``: which region, context or namespace is asked.

    Raises:
        RequestError: The launcher gives its jobs no mark.
        StorageError: A ledger of the folder cannot be read, so it is not known what it names.
    """
    if not isinstance(launcher, FindsJobs):
        raise RequestError(
            f"jobs of {launcher.name} carry no mark by which they could be found without their "
            "run's folder. Ask one of slurm, kubernetes, aws-batch."
        )
    known = _known_ids(known_in, launcher.name)
    recipe = load_recipe([], overrides)
    return [job for job in launcher.find(recipe) if job.id not in known]


def _known_ids(folder: Path, launcher: str) -> set[str | None]:
    found: set[str | None] = set()
    for path in sorted(folder.glob("*/ledger.jsonl")):
        ledger = Ledger(RunDir(path.parent).ledger)
        entries = [*ledger.jobs(), *ledger.side_jobs(), *ledger.all()]
        found |= {entry.id for entry in entries if entry.launcher == launcher}
    return found
