"""Pods of the project's own image train the quickstart as one machine does, whatever happens."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.data.work_units import SCRATCH
from shardyard.launchers.log_markers import NONCE_VARIABLE, parse
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.pod_runs import (
    PodRun,
    loss_difference,
    rendered,
    rendered_side_job,
    repeated_steps,
    train,
)
from tests.launchers.kubernetes.pods import IMAGE, Podman, pod_of_job, pod_of_jobset, running_podman

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
    assert rights["Uid"].split() == ["10001"] * 4
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
    assert "@shardyard:" in pods.podman.run("logs", "jobset-node-0-0-node")  # events and metrics


def test_workers_of_an_elastic_pytorchjob_come_and_go(pods: Pods) -> None:
    run = pods.run("elastic")
    run.elastic()
    killed, back, added, removed = run.changes
    # From a snapshot in memory; at worst from a checkpoint, which there is every 20 steps.
    assert killed.last_step - 20 < killed.first_step <= killed.last_step + 1
    for drained in (back, added, removed):
        assert drained.first_step == drained.last_step + 1, drained
    assert {line["world_size"] for line in read_steps(run.run.metrics)} == {1, 2, 3}
    assert run.run.attempts() == [0, 1]  # a deleted pod drains all, and the others start again
    # Sums in another order differ in the last bit, and training makes more of it with each step;
    # a sample that is missing or read twice would show at once, in the second digit.
    assert loss_difference(run.run, pods.reference, last_step=killed.first_step + 10) <= 1e-5
    assert loss_difference(run.run, pods.reference) <= 1e-3


def prepared(pods: Pods, folder: str, *, is_killed: bool) -> Path:
    """What a side job prepares in a folder of the volume, in one pod or, killed, in two."""
    settings = ("data.source=/runs/text", f"data.dir=/runs/{folder}", "data.workers=1")
    config, job = rendered_side_job(*settings)
    data = pods.volume / folder

    def whole() -> dict[Path, int]:
        records = data.glob(f"*/{SCRATCH}/*.json")
        found = [each for one in records for each in one.parents[1].glob(f"*-{one.stem}.bin")]
        return {path: path.stat().st_mtime_ns for path in found}

    first, second = (pod_of_job(job, number) for number in range(2))
    before: dict[Path, int] = {}
    if is_killed:
        pods.podman.play(config, first)
        end_s = time.monotonic() + 300
        while len(whole()) < 2:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        pods.podman.kill(first["metadata"]["name"])
        before = whole()
        assert not list(data.glob("*/manifest.json")), "it was in the middle"
    pods.podman.play(config, second)
    container = f"{second['metadata']['name']}-node"
    assert pods.podman.wait(container, timeout_s=600) == 0, pods.podman.run("logs", container)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is done twice"
    env = {each["name"]: each["value"] for each in second["spec"]["containers"][0]["env"]}
    lines = pods.podman.run("logs", container).splitlines()
    marked = [found for line in lines if (found := parse(line, nonce=env[NONCE_VARIABLE]))]
    (answer,) = [found.content["result"] for found in marked if found.kind == "answer"]
    place = Path(answer["data"]["dir"])
    assert place.parent == Path("/runs") / folder
    return data / place.name


def test_a_pod_prepares_on_the_volume_and_one_that_was_killed_is_gone_on_with(pods: Pods) -> None:
    (pods.volume / "text").mkdir()
    sources = sorted((Path(__file__).parents[3] / "src" / "shardyard").rglob("*.py"))
    text = "\n\n".join(source.read_text() for source in sources)
    for number in range(4):  # a piece of the work is 1 MiB
        (pods.volume / "text" / f"{number}.txt").write_text(f"{number}\n{text}")
    left_alone = prepared(pods, "alone", is_killed=False)
    killed = prepared(pods, "killed", is_killed=True)
    assert killed.name == left_alone.name
    assert _digests(killed) == _digests(left_alone) != {}


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if path.is_file() and path.name[0] != "."]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
