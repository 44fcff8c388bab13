"""Pods of the project's own image train the quickstart as one machine does, whatever happens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_steps
from tests.launch.kubernetes.pod_runs import (
    PodRun,
    loss_difference,
    rendered,
    repeated_steps,
    train,
)
from tests.launch.kubernetes.pods import IMAGE, Podman, pod_of_jobset, running_podman

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Pods:
    """A podman that has the image, and the volume of all runs."""

    podman: Podman
    volume: Path

    def run(self, run_id: str) -> PodRun:
        return PodRun(self.podman, RunDir(self.volume / run_id))

    @property
    def reference(self) -> RunDir:
        """What `shardyard train` made of the same recipe."""
        run = RunDir(self.volume / "reference")
        if not run.path.exists():
            train(self.podman, run)
        return run


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with running_podman() as podman:
        podman.build()
        yield Pods(podman, podman.make_volume())


def test_the_image_holds_nothing_of_where_its_packages_came_from(pods: Pods) -> None:
    said = pods.podman.run("history", "--no-trunc", IMAGE) + pods.podman.run("inspect", IMAGE)
    assert "127.0.0.1" not in said and "INDEX_URL" not in said


def test_a_pod_has_no_rights(pods: Pods) -> None:
    config, job = rendered("rights", "cluster.nodes=2")
    pod = pod_of_jobset(job, 0, start=1)
    pod["spec"]["containers"][0]["command"] = ["cat", "/proc/self/status"]
    pods.podman.play(config, pod, domain="rights")
    assert pods.podman.wait("rights-node-0-0-node", timeout_s=60) == 0
    status = pods.podman.run("logs", "rights-node-0-0-node")
    rights = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert rights["Uid"].split() == ["1000"] * 4
    assert (rights["CapEff"], rights["CapBnd"]) == ("0" * 16, "0" * 16)
    assert rights["NoNewPrivs"] == "1"


def test_pods_of_a_jobset_compute_what_one_machine_computes_also_after_a_loss(pods: Pods) -> None:
    run = pods.run("jobset")
    run.jobset(lose_a_pod_after=130)
    (change,) = run.changes
    assert change.first_step == 121  # the newest durable checkpoint is of step 120
    assert repeated_steps(run.run) == change.last_step - 120
    assert loss_difference(run.run, pods.reference) == 0.0
    assert {line["world_size"] for line in read_steps(run.run.metrics)} == {2}
    assert "@shardyard " in pods.podman.run("logs", "jobset-node-0-0-node")  # events and metrics


def test_workers_of_an_elastic_pytorchjob_come_and_go(pods: Pods) -> None:
    run = pods.run("elastic")
    run.elastic()
    killed, back, added, removed = run.changes
    assert killed.first_step % 20 == 1  # a checkpoint every 20 steps
    for drained in (back, added, removed):
        assert drained.first_step == drained.last_step + 1, drained
    assert {line["world_size"] for line in read_steps(run.run.metrics)} == {1, 2, 3}
    assert run.run.attempts() == [0, 1]  # a deleted pod drains all, and the others start again
    # Sums in another order differ in the last bit, and training makes more of it with each step;
    # a sample that is missing or read twice would show at once, in the second digit.
    assert loss_difference(run.run, pods.reference, last_step=killed.first_step + 10) <= 1e-5
    assert loss_difference(run.run, pods.reference) <= 1e-3
