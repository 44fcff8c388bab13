"""Many jobs of AWS Batch are described by the hundred, and each is what it says alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.errors import ShardyardError
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.aws_batch.status import STATES
from shardyard.launchers.base import JobState, JobStatus, Submission
from shardyard.launchers.ledger import Ledger
from tests.launchers.batch_requests import batch_request
from tests.launchers.batch_server import REGION, BatchServer, batch_server

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


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    pytest.importorskip("moto.server", reason="needs moto[batch,server]")
    with batch_server(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        server.reset()  # jobs succeed at once
        yield server


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
