"""Thirty jobs of a real Slurm, asked about at once, are what each says alone: in three calls."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from shardyard.control.runs import ask_all
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger, LedgerEntry, Submission
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.rundir.layout import RunDir
from tests.launchers import slurm_node
from tests.launchers.slurm_calls import counted
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster
from tests.launchers.slurm_request import slurm_request

pytestmark = pytest.mark.system

_NUMBERS = count(1)
_CLOSED = ("launch.slurm.partition=short", "launch.time_limit=5min")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        running.client("scontrol", "update", "PartitionName=short", "State=DOWN")
        yield running


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Callable[..., Submission]:
    def submitted(does: str, *overrides: str, nodes: int = 1) -> Submission:
        run_dir = tmp_path / "it's 100% | j" / f"run-{next(_NUMBERS)}"
        words = [f"launch.env={{STAND_IN: {does}}}", *overrides]
        launcher = SlurmLauncher(shell=cluster.shell, program=(slurm_node.__file__,))
        request = slurm_request(*words, run_dir=run_dir, nodes=nodes)
        return launcher.submit(launcher.render(request), Ledger(run_dir / "ledger.jsonl"))

    return submitted


def _thirty(
    cluster: SlurmCluster, submit: Callable[..., Submission], folder: Path
) -> list[Submission]:
    """Of every state that a job can be kept in; and what is no job of a run's."""
    wanted = {"wait": 6, "end 0": 6, "end 2": 5, "end 143": 5}
    jobs = [submit(does) for does, number in wanted.items() for _ in range(number)]
    jobs += [submit("wait", nodes=2), submit("wait", nodes=3)]
    waiting = [submit("wait", *_CLOSED) for _ in range(4)]
    cluster.client("scancel", waiting[-1].id)
    foreign = cluster.client(
        "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300"
    ).strip()
    nobody = {number: _job(folder, number) for number in (foreign, "4000000")}
    return [*jobs, *waiting, *nobody.values()]


def _job(folder: Path, number: str) -> Submission:
    details = {"folder": str(folder), "nodes": "1"}
    return Submission(launcher="slurm", run_id=f"r{number}", id=number, name="r", details=details)


def test_thirty_jobs_are_asked_about_in_three_calls_and_each_is_what_it_says_alone(
    cluster: SlurmCluster, submit: Callable[..., Submission], tmp_path: Path
) -> None:
    jobs = _thirty(cluster, submit, tmp_path)
    mine, calls = counted(cluster, tmp_path)
    launcher = SlurmLauncher(shell=mine.shell)

    def is_settled() -> bool:
        states = Counter(launcher.status(job).state for job in jobs)
        return states == {
            JobState.RUNNING: 8, JobState.SUCCEEDED: 6, JobState.FAILED: 5, JobState.DRAINED: 5,
            JobState.WAITING: 3, JobState.CANCELLED: 1, JobState.GONE: 2,
        }  # fmt: skip

    cluster.wait_until(is_settled, "thirty jobs in their states")
    calls.write_text("")
    alone = [launcher.status(job) for job in jobs]
    assert Counter(calls.read_text().split()) == {"scontrol": 30, "sacct": 1, "sinfo": 8}
    calls.write_text("")
    assert launcher.statuses(jobs) == alone
    assert Counter(calls.read_text().split()) == {"squeue": 1, "sacct": 1, "sinfo": 1}
    calls.write_text("")
    asked = [
        (RunDir(tmp_path / f"run-{job.id}"),
        LedgerEntry(kind="job", name=job.name, launcher="slurm",
                                                   id=job.id, details=job.details))
        for job in jobs
    ]  # fmt: skip
    told = ask_all(asked, {"slurm": launcher}, within_s=60)
    assert told == {f"run-{job.id}": said.state for job, said in zip(jobs, alone, strict=True)}
    assert len(calls.read_text().split()) == 3


def test_a_requeued_job_and_one_whose_node_is_drained_say_the_same_words(
    cluster: SlurmCluster, submit: Callable[..., Submission]
) -> None:
    launcher = SlurmLauncher(shell=cluster.shell)
    again, kept = submit("wait"), submit("wait")
    cluster.wait_until(
        lambda: {cluster.state(again.id), cluster.state(kept.id)} == {"RUNNING"}, "running"
    )
    cluster.client("scontrol", "requeue", again.id)
    cluster.client("scontrol", "requeuehold", kept.id)
    try:
        cluster.wait_until(lambda: cluster.state(again.id) == "PENDING", "pending")

        def is_same() -> bool:
            alone = [launcher.status(again), launcher.status(kept)]
            return launcher.statuses([again, kept]) == alone

        cluster.wait_until(is_same, "the same words")
        said = [launcher.status(again), launcher.status(kept)]
        assert said[0].state is said[1].state is JobState.WAITING
        assert "held" in said[1].reason, said
    finally:
        for job in (again, kept):
            cluster.client("scancel", job.id)


def test_one_number_that_nobody_knows_and_two_of_them_are_gone(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    launcher = SlurmLauncher(shell=cluster.shell)
    jobs = [_job(tmp_path, "4000000"), _job(tmp_path, "4000001")]
    alone = [launcher.status(job) for job in jobs]
    assert launcher.statuses(jobs) == alone == [*launcher.statuses(jobs[:1]), alone[1]]
    assert {said.state for said in alone} == {JobState.GONE}
