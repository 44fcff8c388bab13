"""Thirty jobs on a server on a real socket: asked about at once they say what each says alone."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.control.runs import ask_all
from shardyard.errors import AccessError, CapacityError
from shardyard.launchers.base import Answer, JobState, SideJob, answer
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.kubernetes.state import _CONDITIONS
from shardyard.launchers.ledger import Ledger, LedgerEntry, Submission
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.api_server import RUNNING, ApiServer, exited, running_server
from tests.launchers.kubernetes.requests import request_for

pytestmark = pytest.mark.heavy

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

_POD_LABEL = {
    "JobSet": "jobset.sigs.k8s.io/jobset-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
    "Job": "batch.kubernetes.io/job-name",
}


class World:
    """A server, a launcher that knows it, and jobs whose objects stand there."""

    def __init__(self, server: ApiServer, kubeconfig: Path, folder: Path) -> None:
        self.server = server
        self.launcher = KubernetesLauncher(kubeconfig=kubeconfig)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.jobs: list[Submission] = []

    def submit(self, kind: str, **changes: Any) -> Submission:
        target = "jobset" if kind == "Job" else kind.lower()
        if kind == "Job":
            changes["side"] = SideJob(kind="fetch", arguments={"number": len(self.jobs)})
        request = request_for(
            f"launch.kubernetes.target={target}", run_id=f"run-{len(self.jobs)}", **changes
        )
        job = self.launcher.submit(self.launcher.render(request), self.ledger)
        self.jobs.append(job)
        return job

    def object_of(self, job: Submission) -> dict[str, Any]:
        objects = self.server.objects.values()
        return next(item for item in objects if item["metadata"].get("uid") == job.id)

    def conditions(self, job: Submission, *names: str) -> None:
        found = [{"type": name, "status": "True", "message": f"is {name}"} for name in names]
        self.object_of(job)["status"] = {"conditions": found}

    def pod(self, job: Submission, status: dict[str, Any], *, rank: int = 0) -> None:
        name = f"{job.name}-{rank}"
        self.server.add_pod(name, job=job.name, rank=rank, status=status, lines=[])
        made = self.server.objects[f"/api/v1/namespaces/default/pods/{name}"]
        labels = made["metadata"]["labels"]
        labels[_POD_LABEL[job.details["kind"]]] = labels.pop(_POD_LABEL["JobSet"])

    def entries(self) -> list[tuple[RunDir, LedgerEntry]]:
        folder = self.ledger.path.parent
        return [
            (RunDir(folder / job.run_id),
             LedgerEntry(kind="job", name=job.name, launcher="kubernetes", id=job.id,
                   details=job.details))
            for job in self.jobs
        ]  # fmt: skip

    def alone(self) -> list[str]:
        return [_words(answer(partial(self.launcher.status, job))) for job in self.jobs]

    def at_once(self) -> list[str]:
        return [_words(said) for said in self.launcher.statuses(self.jobs)]

    def asked(self) -> Counter[str]:
        """What was asked since the last time: the last part of each path."""
        found = Counter(path.rpartition("/")[2] for _, path in self.server.requests)
        self.server.requests.clear()
        return found


def _words(said: Answer) -> str:
    return f"{type(said).__name__}: {said}"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_server(tmp_path) as (server, kubeconfig):
        yield World(server, kubeconfig, tmp_path)


def thirty(world: World) -> None:
    """JobSets as they come and go."""
    for number in range(30):
        job = world.submit("JobSet")
        match number % 6:
            case 0:
                world.pod(job, RUNNING)
                world.pod(job, RUNNING, rank=1)
            case 1:
                world.conditions(job, "Completed")
            case 2:
                world.conditions(job, "Failed")
                world.pod(job, exited(143 if number > 15 else 1))
            case 3:
                world.launcher.cancel(job)
            case 4:
                world.object_of(job)["metadata"]["uid"] = "another"  # of another, by now
    world.asked()


def test_thirty_jobs_take_three_calls_in_place_of_65(world: World) -> None:
    thirty(world)
    alone = world.alone()
    before = world.asked()
    # the object of each; its pods, or the ConfigMap of one that is gone; events where no pod came
    assert before.total() == 65 and before["events"] == 5
    assert world.at_once() == alone
    assert world.asked() == {"jobsets": 1, "pods": 1, "configmaps": 1}
    told = ask_all(world.entries(), {"kubernetes": world.launcher}, within_s=60)
    assert Counter(told.values()) == {
        JobState.RUNNING: 5, JobState.SUCCEEDED: 5, JobState.FAILED: 3, JobState.DRAINED: 2,
        JobState.CANCELLED: 5, JobState.GONE: 5, JobState.WAITING: 5,
    }  # fmt: skip
    assert world.asked().total() == 3


def test_every_condition_of_every_kind_is_at_once_what_it_is_alone(world: World) -> None:
    for kind, conditions in _CONDITIONS.items():
        for condition in (*conditions, "Unheard"):
            job = world.submit(kind)
            world.conditions(job, condition)
            world.pod(job, exited(2))
            world.pod(job, RUNNING, rank=1)
    world.submit("JobSet")
    world.pod(world.submit("TrainJob"), {"phase": "Sleeping"})
    ending = world.submit("PyTorchJob")
    world.object_of(ending)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.asked()
    alone = world.alone()
    assert sum("condition 'Unheard'" in said for said in alone) == len(_CONDITIONS)
    world.asked()
    assert world.at_once() == alone
    kinds = {"jobsets": 1, "trainjobs": 1, "pytorchjobs": 1, "jobs": 1}
    assert world.asked() == {**kinds, "pods": 3}  # a label of each controller


def test_names_are_asked_by_the_hundred(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.launchers.kubernetes.launcher._MOST_NAMES", 2)
    for _ in range(3):
        world.pod(world.submit("JobSet"), RUNNING)
    alone = world.alone()
    world.asked()
    assert world.at_once() == alone
    assert world.asked() == {"jobsets": 2, "pods": 2}


def test_a_server_that_does_not_answer_is_asked_once(world: World) -> None:
    thirty(world)
    world.server.refusals["GET", "/jobsets"] = (503, "overloaded")
    with pytest.raises(CapacityError, match="answered 503"):
        world.launcher.statuses(world.jobs)
    assert world.asked() == {"jobsets": 1}


@pytest.mark.parametrize("end", ["/jobsets", "/configmaps"])
def test_where_lists_are_not_permitted_each_job_is_asked_alone(world: World, end: str) -> None:
    thirty(world)
    alone = [said.partition("state=")[2].partition(",")[0] for said in world.alone()]
    world.server.refusals["GET", end] = (403, "cannot list")
    with pytest.raises(AccessError, match="cannot list"):
        world.launcher.statuses(world.jobs)
    told = ask_all(world.entries(), {"kubernetes": world.launcher}, within_s=60)
    states = [repr(JobState(told[job.run_id])) for job in world.jobs]
    assert states == alone
