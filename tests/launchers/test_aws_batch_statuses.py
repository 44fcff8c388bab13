"""Many jobs of AWS Batch are described by the hundred, and each is what it says alone."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.errors import ShardyardError
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.aws_batch.status import STATES
from shardyard.launchers.base import JobState, JobStatus
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.batch_requests import batch_request
from tests.launchers.batch_server import REGION, BatchServer

pytest.importorskip("boto3", reason="needs shardyard[aws]")


@dataclass
class _Batch:
    """Describes what it knows, in an order of its own."""

    known: dict[str, dict[str, Any]]
    asked: list[int] = field(default_factory=list)
    """How many ids each call had."""
    meta: Any = field(default_factory=lambda: SimpleNamespace(region_name=REGION))

    def describe_jobs(self, *, jobs: list[str]) -> dict[str, Any]:
        self.asked.append(len(jobs))
        known = [one for one in sorted(jobs, reverse=True) if one in self.known]
        return {"jobs": [self.known[one] for one in known]}


def _job(number: int) -> Submission:
    job_id = f"00000000-0000-0000-0000-{number:012}"
    return Submission(
        launcher="aws-batch", run_id=f"r{number}", id=job_id, name="n", details={"region": REGION}
    )


def _launcher(batch: _Batch) -> BatchLauncher:
    launcher = BatchLauncher(now=lambda: 1_795_000_000.0)
    launcher._clients[REGION, "batch"] = batch
    return launcher


def test_every_state_is_at_once_what_it_is_alone() -> None:
    jobs = [_job(number) for number in range(130)]
    known: dict[str, dict[str, Any]] = {}
    codes = (0, 1, 143)
    for number, job in enumerate(jobs[:-1]):
        word = list(STATES)[number % len(STATES)]
        nodes = number % 3 + 1
        attempt = {"container": {"exitCode": codes[number // len(STATES) % 3]}}
        known[job.id] = {
            "jobId": job.id, "status": word, "attempts": [attempt],
            "isTerminated": number % 5 == 0,
            **({"nodeProperties": {"numNodes": nodes}} if nodes > 1 else {}),
        }  # fmt: skip
        for node in range(nodes if nodes > 1 else 0):
            known[f"{job.id}#{node}"] = {"jobId": f"{job.id}#{node}", "status": word}
    batch = _Batch(known)
    launcher = _launcher(batch)
    alone = [launcher.status(job) for job in jobs]
    assert len({said.state for said in alone}) == len(JobState)
    assert {len(said.nodes) for said in alone} == {0, 2, 3}
    batch.asked.clear()
    assert launcher.statuses(jobs) == alone
    assert batch.asked[:2] == [100, 30] and set(batch.asked[2:-1]) == {100}


def test_an_unknown_state_of_one_job_does_not_hide_the_others() -> None:
    one, odd = _job(1), _job(2)
    known = {one.id: {"jobId": one.id, "status": "RUNNING"},
             odd.id: {"jobId": odd.id, "status": "PAUSED"}}  # fmt: skip
    launcher = _launcher(_Batch(known))
    error, said = launcher.statuses([odd, one])
    assert isinstance(error, ShardyardError) and "PAUSED" in str(error)
    assert isinstance(said, JobStatus) and said.state is JobState.RUNNING
    with pytest.raises(ShardyardError, match="PAUSED"):
        launcher.status(odd)


class _Pages:
    """The two calls that answer by the page, of one queue whose jobs are of a name each."""

    def __init__(self, batch: "_Region", call: str) -> None:
        self.batch, self.call = batch, call

    def paginate(self, **asked: Any) -> list[dict[str, Any]]:
        if self.call == "describe_job_queues":
            return [{"jobQueues": [{"jobQueueName": "trainers"}]}]
        assert asked["jobQueue"] == "trainers"
        assert asked["filters"] == [{"name": "JOB_NAME", "values": ["shardyard-*"]}]
        return [{"jobSummaryList": [one]} for one in self.batch.known.values()]


class _Region(_Batch):
    def get_paginator(self, call: str) -> _Pages:
        return _Pages(self, call)


def test_jobs_of_ours_are_found_by_their_tag_without_any_ledger() -> None:
    running, over, foreign = (_job(number).id for number in (1, 2, 3))
    known = {
        job_id: {
            "jobId": job_id, "jobName": "shardyard-x", "status": word, "tags": tags,
            "jobQueue": f"arn:aws:batch:{REGION}:123456789012:job-queue/trainers",
        }
        for job_id, word, tags in (
            (running, "RUNNING", {"shardyard-run": "x"}),
            (over, "SUCCEEDED", {"shardyard-run": "y"}),
            (foreign, "RUNNING", {}),
        )
    }  # fmt: skip
    recipe = batch_request("cluster.instance=p4d.24xlarge").recipe
    (found,) = _launcher(_Region(known)).find(recipe)
    assert (found.id, found.run_id, found.state) == (running, "x", JobState.RUNNING)
    assert found.where == f"queue trainers in {REGION}"
    assert found.end.startswith(f"aws batch terminate-job --region {REGION} --job-id {running}")


@pytest.fixture
def batch(moto: BatchServer, monkeypatch: pytest.MonkeyPatch) -> BatchServer:
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    moto.reset()  # jobs succeed at once
    return moto


@pytest.mark.heavy
def test_thirty_jobs_take_two_calls_in_place_of_fifty_eight(
    batch: BatchServer, tmp_path: Path
) -> None:
    batch.make_queue("trainers")
    launcher = BatchLauncher()
    request = batch_request(
        "model.preset=llama2-7b", "cluster.instance=p4d.24xlarge", "cluster.nodes=2"
    )
    jobs: list[Submission] = []
    for number in range(28):
        rendered = launcher.render(replace(request, run_id=f"llama-{number}"))
        jobs.append(launcher.submit(rendered, Ledger(tmp_path / f"{number}.jsonl")))
    jobs += [_job(1), _job(2)]
    calls: list[str] = []
    events = launcher._client(REGION, "batch").meta.events
    events.register("before-call.batch.DescribeJobs", lambda **_: calls.append("DescribeJobs"))
    alone = [launcher.status(job) for job in jobs]
    assert len(calls) == 58  # each job, and the nodes of those that are there
    calls.clear()
    assert launcher.statuses(jobs) == alone
    assert len(calls) == 2
    states = Counter(said.state for said in alone)
    assert states == {JobState.SUCCEEDED: 28, JobState.GONE: 2}
