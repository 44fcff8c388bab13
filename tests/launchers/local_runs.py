"""Real local jobs of the smallest model, in a folder of their own, and nothing left of them."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.config.load import dump_recipe
from shardyard.config.paths import make_paths_absolute
from shardyard.config.rules.check import load_checked_recipe
from shardyard.launchers.base import JobStatus, LaunchRequest
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.local import LocalLauncher
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import PATIENCE_S, Place

TWO_NODES = ("cluster.nodes=2", "cluster.devices=1")


@dataclass
class LocalRuns:
    """Launches runs of a recipe in its place."""

    place: Place
    recipe: str = "tiny.yaml"
    launcher: LocalLauncher = field(default_factory=LocalLauncher)
    _has_killed: bool = field(default=False, init=False)
    _jobs: list[Submission] = field(default_factory=list, init=False)

    def request(self, run_id: str, *overrides: str, launched_dir: str = "runs") -> LaunchRequest:
        with _inside(self.place.folder):
            words = [f"run.id={run_id}", *overrides]
            recipe = make_paths_absolute(load_checked_recipe([Path(self.recipe)], words))
            recipe = _with_prepared(recipe, self.place.folder)
        assert isinstance(recipe.cluster.devices, int)
        return LaunchRequest(
            run_id=run_id,
            recipe=recipe,
            recipe_text=dump_recipe(recipe),
            nodes=recipe.cluster.nodes,
            devices_per_node=recipe.cluster.devices,
            cluster=None,
            run_dir=str(self.place.folder / launched_dir / run_id),
        )

    def launch(self, run_id: str, *overrides: str) -> Submission:
        """Submit, as a command line in this place would."""
        request = self.request(run_id, *overrides)
        rendered = self.launcher.render(request)
        with _environment(self.place.environment()):
            job = self.launcher.submit(rendered, Ledger(self.run_dir(run_id).ledger))
        self._jobs.append(job)
        return job

    def run_dir(self, run_id: str) -> RunDir:
        return self.place.run_dir(run_id)

    def wait(self, job: Submission) -> JobStatus:
        """Until it is over."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (status := self.launcher.status(job)).state.is_over:
            assert time.monotonic() < deadline_s, self.said(job)
            time.sleep(0.1)
        return status

    def said(self, job: Submission) -> str:
        """All that the nodes printed."""
        lines = self.launcher.logs(job, node=None, follow=False)
        return "\n".join(f"{line.source}: {line.text}" for line in lines)

    def kill_node(self, job: Submission, rank: int) -> None:
        """As a machine that loses its power: the entry, its agent and what that started."""
        self.kill(self.entry(job, rank))

    def kill_program(self, job: Submission, rank: int) -> None:
        """Only the process that the supervisor started."""
        self._has_killed = True
        os.kill(self.entry(job, rank), signal.SIGKILL)

    @contextmanager
    def added_node(self, job: Submission, rank: int) -> Iterator[int]:
        """One node more, as a scheduler adds it: its process."""
        words = Path(f"/proc/{self.entry(job, 0)}/cmdline").read_text().split("\0")[:-1]
        words[words.index("--node-rank") + 1] = str(rank)
        words[words.index("--nodes") + 1] = str(rank + 1)
        environment = self.place.environment()
        with subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL) as process:
            yield process.pid

    def kill(self, entry: int) -> None:
        """Kill a node's entry and all below it."""
        for pid in tree(entry):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._has_killed = True

    def tidy_up(self) -> None:
        """End what a failed test left, and remove what killed processes left."""
        for job in self._jobs:
            if not self.launcher.status(job).state.is_over:
                self.kill(int(job.id.partition("-")[0]))
        if self._has_killed:
            for name in self.place.files_left():
                shutil.rmtree(self.place.scratch / name, ignore_errors=True)

    def entry(self, job: Submission, rank: int) -> int:
        """The process that the supervisor started for a node."""
        pid = int(job.id.partition("-")[0])
        for child in _children(pid):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if words[words.index(b"--node-rank") + 1] == str(rank).encode():
                return child
        raise AssertionError(f"node {rank} does not run")


def tree(pid: int) -> list[int]:
    """A process and all below it, itself first."""
    return [pid, *(below for child in _children(pid) for below in tree(child))]


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def _with_prepared(recipe: Any, folder: Path) -> Any:
    data = recipe.data.model_copy(update={"dir": str(folder / "prepared")})
    return recipe.model_copy(update={"data": data})


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """What a job inherits: our mark, so that a test sees what is left of it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
