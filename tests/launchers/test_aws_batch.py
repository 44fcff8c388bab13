"""A job's life on AWS Batch, against a moto server over HTTP, and the ledger after each step."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.aws_batch.requests import job_name
from shardyard.launchers.base import JobState, Rendered, SideJob
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.batch_requests import batch_request
from tests.launchers.batch_server import REGION, BatchServer

pytest.importorskip("boto3", reason="needs shardyard[aws]")
pytest.importorskip("moto.server", reason="needs moto[batch,server]")

pytestmark = pytest.mark.heavy

NAME = job_name("llama-1")


@pytest.fixture
def batch(moto: BatchServer, monkeypatch: pytest.MonkeyPatch) -> BatchServer:
    """An empty server that this process speaks to."""
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    moto.reset()
    return moto


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def rendered(*overrides: str, submission: int = 1, nonce: str = "") -> Rendered:
    request = batch_request(
        "model.preset=llama2-7b", "cluster.instance=p4d.24xlarge", "cluster.nodes=2",
        *overrides,
    )  # fmt: skip
    return BatchLauncher().render(replace(request, submission=submission, nonce=nonce))


def actions(ledger: Ledger) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    return [(line["action"], line["kind"]) for line in lines]


def until_over(job: Submission) -> JobState:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        state = BatchLauncher().status(job).state
        if state.is_over:
            return state
        time.sleep(0.2)
    raise AssertionError("the job did not end")


def test_a_job_lives_from_submission_to_removal(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    launcher = BatchLauncher()
    job = launcher.submit(rendered(), ledger)
    assert actions(ledger) == [
        ("intended", "batch job definition"),
        ("created", "batch job definition"),
        ("intended", "batch job"),
        ("created", "batch job"),
    ]
    assert [(entry.kind, entry.is_confirmed) for entry in ledger.live()] == [
        ("batch job definition", True),
        ("batch job", True),
    ]
    assert job.name == NAME
    assert job.details["region"] == REGION
    assert job.details["definition"] in batch.definitions(NAME)

    status = launcher.status(job)
    assert status.state is JobState.SUCCEEDED
    assert "exit code 0" in status.reason

    batch.write_log(f"{NAME}/default/{job.id}", "step 1", "step 2")
    lines = list(launcher.logs(job, node=0, follow=True))
    assert [(line.source, line.text) for line in lines] == [
        ("node 0", "step 1"),
        ("node 0", "step 2"),
    ]

    launcher.cancel(job)
    launcher.cancel(job)
    assert launcher.status(job).state is JobState.SUCCEEDED

    assert launcher.remove(job, ledger).removed == [f"batch job definition {NAME}:1"]
    assert ledger.live() == []
    assert batch.definitions(NAME) == []
    assert launcher.remove(job, ledger).removed == []


def test_a_waiting_job_is_cancelled_twice(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    batch.hold_jobs(seconds=2)
    launcher = BatchLauncher()
    job = launcher.submit(rendered(), ledger)
    status = launcher.status(job)
    assert status.state is JobState.WAITING
    launcher.cancel(job)
    launcher.cancel(job)
    assert until_over(job) is JobState.CANCELLED
    assert "cancelled by shardyard" in launcher.status(job).reason


def test_removal_ends_a_waiting_job_first(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    batch.hold_jobs(seconds=2)
    launcher = BatchLauncher()
    job = launcher.submit(rendered(), ledger)
    assert launcher.remove(job, ledger).removed == [
        f"batch job {job.id}",
        f"batch job definition {NAME}:1",
    ]
    assert ledger.live() == []
    assert until_over(job) is JobState.CANCELLED


def test_a_run_has_one_job_at_a_time(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    batch.hold_jobs(seconds=60)
    launcher = BatchLauncher()
    job = launcher.submit(rendered(), ledger)
    before = ledger.path.read_text()
    with pytest.raises(RequestError, match="has a job already") as raised:
        launcher.submit(rendered(), ledger)
    assert job.id in str(raised.value)
    assert "shardyard cancel" in str(raised.value)
    assert ledger.path.read_text() == before
    assert len(batch.definitions(NAME)) == 1


def test_a_resumed_run_leaves_no_revision_behind(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    launcher = BatchLauncher()
    launcher.submit(rendered(), ledger)
    again = launcher.submit(rendered(), ledger)  # as after a lost ledger line: the same name
    job = launcher.submit(rendered(submission=2), ledger)
    assert job.name == f"{NAME}-s2" != again.name
    assert (len(batch.definitions(NAME)), len(batch.definitions(job.name))) == (2, 1)
    newest, first = launcher.remove(job, ledger), launcher.remove(again, ledger)  # as a tear-down
    assert (len(newest.removed), len(first.removed)) == (1, 2)
    assert batch.definitions(NAME) + batch.definitions(job.name) == []


def test_nothing_is_left_when_the_submission_is_refused(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    request = rendered()
    definition, submission = request.objects
    params = {**submission["params"], "jobDefinition": "another"}  # as if it were gone meanwhile
    broken = Rendered(
        launcher=request.launcher, run_id=request.run_id, name=request.name, text=request.text,
        objects=(definition, {**submission, "params": params}), target=request.target,
    )  # fmt: skip
    with pytest.raises(RequestError, match="Job definition another does not exist"):
        BatchLauncher().submit(broken, ledger)
    assert batch.definitions(NAME) == []
    assert ledger.live() == []
    assert ("failed", "batch job") in actions(ledger)
    assert ("removed", "batch job definition") in actions(ledger)


def test_an_interrupted_submission_is_found_by_its_name(
    batch: BatchServer, ledger: Ledger, tmp_path: Path
) -> None:
    batch.make_queue("trainers")
    batch.hold_jobs(seconds=60)
    launcher = BatchLauncher()
    lost = Ledger(tmp_path / "lost.jsonl")
    job = launcher.submit(rendered(nonce="n"), lost)
    place = lost.live()[0].details
    ledger.intend("batch job definition", NAME, launcher="aws-batch", **place)
    ledger.intend("batch job", NAME, launcher="aws-batch", **place)
    unknown = Submission(launcher="aws-batch", run_id="llama-1", id="", name=NAME, details=place)
    assert launcher.remove(unknown, ledger).removed == [
        f"batch job {job.id}",
        f"batch job definition {NAME}:1",
    ]
    assert ledger.live() == []


def test_a_job_that_batch_forgot_is_gone(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    launcher = BatchLauncher()
    job = launcher.submit(rendered(), ledger)
    batch.reset()
    assert launcher.status(job).state is JobState.GONE
    with pytest.raises(RequestError, match="no more") as raised:
        list(launcher.logs(job, node=None, follow=False))
    assert "/aws/batch/job" in str(raised.value)


def test_a_log_group_of_the_queues_own_is_written_to_and_read(
    batch: BatchServer, ledger: Ledger
) -> None:
    group = "/shardyard/trainers"
    batch.make_queue("trainers")
    launcher = BatchLauncher()
    job = launcher.submit(rendered(f"launch.aws_batch.log_group={group}"), ledger)
    ledger.record(job)
    (noted,) = ledger.jobs()
    assert noted.details["log_group"] == group
    batch.write_log(f"{NAME}/default/{job.id}", "step 1", group=group)
    lines = list(launcher.logs(job, node=0, follow=False))
    assert [line.text for line in lines] == ["step 1"]
    batch.reset()
    with pytest.raises(RequestError, match=f"streams of the log group {group}"):
        list(launcher.logs(job, node=0, follow=False))


def test_logs_of_a_node_that_does_not_exist_are_refused(batch: BatchServer, ledger: Ledger) -> None:
    batch.make_queue("trainers")
    launcher = BatchLauncher()
    job = launcher.submit(rendered(), ledger)
    with pytest.raises(RequestError, match=r"node 2 does not exist.* 2 nodes"):
        list(launcher.logs(job, node=2, follow=False))


def test_removing_a_side_job_leaves_the_training_beside_it(
    batch: BatchServer, ledger: Ledger
) -> None:
    batch.make_queue("trainers")
    batch.hold_jobs(seconds=60)
    launcher = BatchLauncher()
    training = launcher.submit(rendered(), ledger)
    request = batch_request("cluster.instance=p4d.24xlarge")
    side = SideJob(kind="fetch")
    asked = launcher.render(replace(request, side=side, nodes=1, cluster=None))
    job = launcher.submit(asked, ledger)
    assert launcher.status(job).state is JobState.WAITING
    assert launcher.remove(job, ledger).removed == [
        f"batch job {job.id}",
        f"batch job definition {job.name}:1",
    ]
    assert launcher.status(training).state is JobState.WAITING
    assert batch.definitions(NAME) != []
    assert {entry.name for entry in ledger.live()} == {NAME}
    launcher.remove(training, ledger)
    assert ledger.live() == []
