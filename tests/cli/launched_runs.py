"""Runs launched by a launcher in memory, for the tests of the verbs that steer them."""

from pathlib import Path

from shardyard.cli import main
from shardyard.launchers.base import JobState, JobStatus
from tests.cli.fake_launcher import FakeLauncher

RECIPE = """
model: {preset: llama-tiny}
run: {steps: 10}
optim: {global_batch: 8, micro_batch: 1}
cluster: {device: cpu, devices: 2, nodes: 2}
elastic: {min_nodes: 1, max_nodes: 4}
"""


def shardyard(launcher: FakeLauncher, *arguments: str) -> int:
    """The command line with this launcher alone."""
    return main(arguments, launchers={"fake": launcher})


def launch(folder: Path, launcher: FakeLauncher, *arguments: str) -> int:
    """Launch the recipe as run ``first`` in ``folder``/runs."""
    recipe = folder / "small.yaml"
    recipe.write_text(RECIPE)
    where = (f"run.dir={folder / 'runs'}", "run.id=first")
    return shardyard(launcher, "launch", str(recipe), "--on", "fake", *where, *arguments)


def runs_dir(folder: Path) -> tuple[str, str]:
    return ("--runs-dir", str(folder / "runs"))


def status(state: JobState, reason: str = "so it is", exit_code: int | None = None) -> JobStatus:
    return JobStatus(
        state=state, reason=reason, exit_code=exit_code, nodes=(("a", "up"), ("b", "down"))
    )
