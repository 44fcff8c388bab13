"""The quickstart in pods, as its controllers would start, lose, add and remove them.

There is no JobSet controller and no training operator here: this module does what they do, as
their documentation and source say. Podman does the kubelet's part, restarts of containers
included, but at once: a kubelet waits 10 s before the first.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.pods import (
    IMAGE,
    VOLUME,
    Podman,
    pod_of_jobset,
    worker_of_pytorchjob,
)

QUICKSTART = Path(__file__).parents[3] / "benchmarks" / "laptop.yaml"
OVERRIDES = (
    "cluster.devices=1", f"launch.image={IMAGE}", "launch.kubernetes.context=none",
    f"launch.volumes=[{{path: /runs, claim: {VOLUME}}}]", "launch.run_dir=/runs",
    "launch.kubernetes.shared_memory_gib=1",
    # The pods share this machine's cores; as many threads a process as with two on one node.
    "launch.env={OMP_NUM_THREADS: '1'}",
)  # fmt: skip
ELASTIC = (
    "launch.kubernetes.target=pytorchjob", "elastic.min_nodes=1", "elastic.max_nodes=3",
    "checkpoint.every=20",
)  # fmt: skip

_PATIENCE_S = 900.0
_RUN_PATIENCE_S = 2400.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happened to the pods, and what the run made of it."""

    what: str
    last_step: int
    """Newest step when it happened."""
    first_step: int
    """Of those that were computed afterwards."""
    world_size: int
    """Of the steps afterwards."""
    seconds: float
    """From when it happened to the first step afterwards."""


@dataclass
class PodRun:
    """One run in pods."""

    podman: Podman
    run: RunDir
    """Its folder on the volume, as this machine sees it."""
    changes: list[Change] = field(default_factory=list)
    settings: tuple[str, ...] = ()
    """Of the recipe, in place of its own."""

    def jobset(self, *, lose_a_pod_after: int | None = None) -> None:
        """Two pods of a JobSet, to the end; one may be killed after this step.

        Then the Job controller ends the other, and JobSet makes both again.
        """
        config, job = rendered(self.run.run_id, "cluster.nodes=2", *self.settings)
        pods = [f"{self.run.run_id}-node-0-{rank}" for rank in range(2)]

        def start(number: int) -> None:
            for rank in range(2):
                pod = pod_of_jobset(job, rank, start=number)
                self.podman.play(config, pod, domain=self.run.run_id)

        def lose() -> None:
            self.podman.kill(pods[1])
            self.podman.delete(pods[0])
            start(2)

        start(1)
        if lose_a_pod_after is not None:
            self._wait_for(lambda: self._newest_step() >= lose_a_pod_after, "steps")
            self._change("one of two pods is killed, JobSet starts both again", lose, world_size=2)
        self._finish(f"{pod}-node" for pod in pods)

    def elastic(self) -> None:
        """An elastic PyTorchJob that starts with two workers and is not left alone."""
        config, job = rendered(self.run.run_id, "cluster.nodes=2", *ELASTIC, *self.settings)
        workers = [f"{self.run.run_id}-worker-{rank}" for rank in range(3)]

        def start(rank: int) -> None:
            self.podman.play(config, worker_of_pytorchjob(job, rank))

        start(0)
        start(1)
        self._wait_for(lambda: self.run.latest.is_file(), "a checkpoint")
        self._change("worker 1 is killed", lambda: self.podman.kill(workers[1]), world_size=1)
        self._change("the operator makes worker 1 again", lambda: start(1), world_size=2)
        self._change("scaled to 3: worker 2 is added", lambda: start(2), world_size=3)
        self._change(
            "scaled to 2: worker 2 is deleted",
            lambda: self.podman.delete(workers[2]),
            world_size=2,
        )
        self._finish(f"{worker}-pytorch" for worker in workers[:2])

    def _change(self, what: str, act: Callable[[], None], *, world_size: int) -> None:
        """Do something to the pods, and wait until the run goes on with so many processes."""
        lines = self._steps()
        membership = (lines[-1]["attempt"], lines[-1]["generation"])
        started = time.monotonic()
        act()
        found: list[dict[str, Any]] = []

        def goes_on() -> bool:
            after = [
                line
                for line in self._steps()
                if (line["attempt"], line["generation"]) > membership
                and line["world_size"] == world_size
            ]
            found.extend(after[:1])
            return bool(after)

        self._wait_for(goes_on, f"{world_size} processes after: {what}")
        lines = self._steps()
        change = Change(
            what=what,
            last_step=lines[lines.index(found[0]) - 1]["step"],
            first_step=found[0]["step"],
            world_size=world_size,
            seconds=round(time.monotonic() - started, 1),
        )
        self.changes.append(change)

    def _finish(self, containers: Iterable[str]) -> None:
        for name in containers:
            code = self.podman.wait(name, timeout_s=_RUN_PATIENCE_S)
            assert code == 0, self.podman.run("logs", name)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"waited for {what}; {self.changes}"
            time.sleep(0.3)

    def _newest_step(self) -> int:
        return max((line["step"] for line in self._steps()), default=0)

    def _steps(self) -> list[dict[str, Any]]:
        """All lines of steps, repeated ones too."""
        return [line for line in read_lines(self.run.metrics) if "eval" not in line]


def train(podman: Podman, run: RunDir, *settings: str) -> None:
    """`shardyard train` with two processes, in one container of the same image."""
    mounts = (f"--volume={QUICKSTART}:/quickstart.yaml:ro", f"--volume={VOLUME}:/runs")
    user = ("--user=10001:10001", "--env=HOME=/tmp", "--env=USER=shardyard", "--network=none")
    words = ("run.dir=/runs", "data.dir=/runs/prepared", f"run.id={run.run_id}")
    podman.run(
        "run", "--rm", "--shm-size=1g", *user, *mounts, IMAGE,
        "shardyard", "train", "/quickstart.yaml", *words, *settings,
        timeout_s=_RUN_PATIENCE_S,
    )  # fmt: skip


def rendered(run_id: str, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and job, as `shardyard launch --dry-run` prints them."""
    command = [sys.executable, "-m", "shardyard", "launch", str(QUICKSTART)]
    words = ["--on=kubernetes", "--dry-run", f"run.id={run_id}", *OVERRIDES, *overrides]
    text = subprocess.check_output([*command, *words], stderr=subprocess.DEVNULL, text=True)
    config, *_, job = yaml.safe_load_all(text)
    return config, job


def loss_difference(one: RunDir, other: RunDir, *, last_step: int | None = None) -> float:
    """Greatest relative difference of the losses of a step; both have the same steps."""
    pairs = zip(read_steps(one.metrics), read_steps(other.metrics), strict=True)
    found = [abs(float(a["loss"]) / float(b["loss"]) - 1) for a, b in pairs]
    return max(found[:last_step])


def repeated_steps(run: RunDir) -> int:
    """Steps that were computed again after lost work."""
    lines = [line["step"] for line in read_lines(run.metrics) if "eval" not in line]
    return len(lines) - len(set(lines))


def rendered_side_job(*overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and Job, as `shardyard prepare --on kubernetes --dry-run` prints them."""
    command = [sys.executable, "-m", "shardyard", "prepare", str(QUICKSTART)]
    words = ["--on=kubernetes", "--dry-run", *OVERRIDES, *overrides]
    text = subprocess.check_output([*command, *words], stderr=subprocess.DEVNULL, text=True)
    config, *_, job = yaml.safe_load_all(text)
    return config, job
