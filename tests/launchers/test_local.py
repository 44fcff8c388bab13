"""The local launcher: what it renders and refuses, and what it says of processes that are gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.config.load import dump_recipe
from shardyard.config.schema.launch import Launch
from shardyard.config.schema.recipe import Cluster, Elastic, Recipe
from shardyard.errors import RequestError, ShardyardError, StorageError
from shardyard.io.files import write_json
from shardyard.launchers.base import JobState, LaunchRequest, Removal
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.local import LocalLauncher, start_supervisor
from shardyard.launchers.local_job import JobFile
from shardyard.launchers.process_identity import Identity
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease

LOCAL = LocalLauncher()


def request_for(run_dir: Path, *, nodes: int = 2, device: str = "cpu") -> LaunchRequest:
    recipe = Recipe(
        cluster=Cluster.model_validate({"nodes": nodes, "devices": 1, "device": device}),
        launch=Launch(time_limit="90min", env={"NAME": "two words"}),
        elastic=Elastic(max_restarts=2, drain_timeout_s=30.0),
    )
    return LaunchRequest(
        run_id=run_dir.name, recipe=recipe, recipe_text=dump_recipe(recipe), nodes=nodes,
        devices_per_node=1, cluster=None, run_dir=str(run_dir),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "r")


@pytest.fixture
def job(run: RunDir) -> Iterator[Submission]:
    """A job whose supervisor does nothing."""
    with idle_supervisor(run.path / "logs" / "job-0") as process:
        yield job_of(run, process.pid)
        process.kill()


def idle_supervisor(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that was started as a supervisor is, and waits until it is killed."""
    words = ["bash", "-c", "read", "-m", "shardyard.launchers.local_job", str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE)


def job_of(run: RunDir, pid: int) -> Submission:
    folder = run.path / "logs" / "job-0"
    folder.mkdir(parents=True)
    write_json(
        folder / "job.json",
        {
            "program": ["python"], "run_dir": str(run.path), "nodes": 2, "fewest_nodes": 2,
            "devices_per_node": 1, "env": {}, "max_restarts": 3, "drain_timeout_s": 1.0,
            "time_limit_s": None,
        },
    )  # fmt: skip
    who = Identity.of(pid)
    assert who is not None
    details = {"folder": str(folder), "boot": who.boot}
    return Submission(
        launcher="local", run_id="r", id=f"{pid}-{who.started}", name="r/job-0", details=details
    )


def ended(run: RunDir, code: int | None, reason: str = "") -> None:
    nodes = [{"pid": 1, "exit_code": code}, {"pid": 2, "exit_code": -9}]
    content = {"exit_code": code, "reason": reason, "restarts": 1, "nodes": nodes}
    write_json(run.path / "logs" / "job-0" / "status.json", content)


@pytest.mark.heavy
def test_the_request_is_one_command_a_node_and_the_recipe(run: RunDir) -> None:
    rendered = LOCAL.render(request_for(run.path))
    commands = [line for line in rendered.text.splitlines() if "shardyard.node" in line]
    assert len(commands) == 2
    assert "JOB/recipe.yaml" in commands[0] and "--place given" in commands[0]
    assert "--node-rank 1 --nodes 2 --rendezvous 127.0.0.1:PORT" in commands[1]
    assert "export NAME='two words'" in rendered.text
    assert "max_restarts: 2" in rendered.text
    (content,) = rendered.objects
    job = JobFile(**content)
    assert (job.nodes, job.max_restarts, job.drain_timeout_s) == (2, 2, 30.0)
    assert job.time_limit_s == 5400
    assert rendered == LOCAL.render(request_for(run.path))  # pure


@pytest.mark.heavy
def test_what_is_printed_does_not_act_on_a_terminal(run: RunDir) -> None:
    plain = request_for(run.path)
    launch = plain.recipe.launch.model_copy(update={"env": {"NAME": "a\x1b]0;b\x07'c"}})
    recipe = plain.recipe.model_copy(update={"launch": launch})
    text = LOCAL.render(replace(plain, recipe=recipe, recipe_text=dump_recipe(recipe))).text
    assert all(line.isprintable() for line in text.splitlines())
    export = next(line for line in text.splitlines() if line.startswith("export NAME="))
    shown = subprocess.run(
        ["bash", "-c", f'{export}; printf %s "$NAME"'], capture_output=True, check=True
    )
    assert shown.stdout == b"a\x1b]0;b\x07'c"


@pytest.mark.parametrize("device", ["cuda", "hpu", "xpu"])
def test_several_nodes_on_the_accelerators_of_one_machine_are_refused(
    run: RunDir, device: str
) -> None:
    with pytest.raises(RequestError) as caught:
        LOCAL.render(request_for(run.path, device=device))
    assert "every node would take the same accelerators" in str(caught.value)
    assert "cluster.nodes=1" in str(caught.value)
    assert LOCAL.render(request_for(run.path, device=device, nodes=1)).objects


def test_a_run_that_is_being_trained_is_not_submitted_again(run: RunDir) -> None:
    lease = Lease(run.lease)
    ledger = Ledger(run.path / "ledger.jsonl")
    with pytest.raises(RequestError, match=r"is being trained already.*shardyard cancel"):
        LOCAL.submit(LOCAL.render(request_for(run.path)), ledger)
    lease.close()
    assert ledger.live() == []


def test_a_folder_that_cannot_be_made_is_named(run: RunDir) -> None:
    run.path.mkdir(parents=True)
    (run.path / "logs").write_text("a file")
    with pytest.raises(StorageError, match="job-0 cannot be made"):
        LOCAL.submit(LOCAL.render(request_for(run.path)), Ledger(run.path / "ledger.jsonl"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (["sh", "-c", "echo no room >&2; exit 1"], "no room"),
        (["/no/such/program"], "No such file"),
        (["true"], "Expecting value"),
    ],
)
def test_a_supervisor_that_does_not_start_says_why(
    tmp_path: Path, program: list[str], words: str
) -> None:
    with pytest.raises(ShardyardError) as caught:
        start_supervisor(tmp_path, program)
    assert "did not start" in str(caught.value) and words in str(caught.value)
    assert "ulimit -u" in str(caught.value)


@pytest.mark.heavy
def test_a_job_that_runs_prepares_then_trains(run: RunDir, job: Submission) -> None:
    assert LOCAL.status(job).state is JobState.RUNNING
    assert LOCAL.status(job).reason == "preparing"
    lease = Lease(run.lease)
    assert LOCAL.status(job).reason == "training"
    lease.close()


CODES = [
    (0, JobState.SUCCEEDED),
    (143, JobState.DRAINED),
    (130, JobState.DRAINED),
    (1, JobState.FAILED),
    (2, JobState.FAILED),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("code", "state"), CODES)
def test_a_job_ended_as_it_wrote(run: RunDir, job: Submission, code: int, state: JobState) -> None:
    gone = replace(job, id=f"{job.id}0")  # the same number, another time of start
    ended(run, code, "it was cancelled")
    events = EventWriter(run.events, attempt=0, generation=0)
    events.write("attempt_ended", outcome="drained", reason="drained; step 3", exit_code=code)
    events.close()
    status = LOCAL.status(gone)
    assert (status.state, status.exit_code) == (state, code)
    assert status.reason == "drained; step 3; it was cancelled"
    assert status.nodes[1] == ("node 1", "killed by SIGKILL")


@pytest.mark.heavy
def test_a_number_that_was_given_to_another_process_is_not_the_job(
    run: RunDir, job: Submission
) -> None:
    ended(run, None)
    for other in (
        replace(job, id=f"{job.id}0"),
        replace(job, details={**job.details, "boot": "another"}),
    ):
        status = LOCAL.status(other)
        assert status.state is JobState.FAILED and status.exit_code == 1
        assert "supervising process was killed, or the machine was restarted" in status.reason
        LOCAL.cancel(other)
    pid = int(job.id.partition("-")[0])
    assert Identity.of(pid) is not None  # it was not cancelled


@pytest.mark.heavy
def test_nodes_that_outlive_their_supervisor_are_still_running(
    run: RunDir, job: Submission
) -> None:
    lease = Lease(run.lease)
    status = LOCAL.status(replace(job, id=f"{job.id}0"))
    assert status.state is JobState.RUNNING and "the nodes are draining" in status.reason
    lease.close()


@pytest.mark.heavy
def test_a_job_whose_folder_was_removed_is_gone(job: Submission, tmp_path: Path) -> None:
    elsewhere = replace(job, details={**job.details, "folder": str(tmp_path / "none")})
    assert LOCAL.status(elsewhere).state is JobState.GONE


@pytest.mark.heavy
def test_a_process_that_ended_and_was_not_asked_how_is_not_alive() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert Identity.of(process.pid) is None
    process.wait()


@pytest.mark.heavy
def test_logs_of_one_node_or_of_all(run: RunDir, job: Submission) -> None:
    for rank in range(2):
        (run.path / "logs" / "job-0" / f"node-{rank}.log").write_text(f"I am {rank}\n")
    lines = list(LOCAL.logs(job, node=None, follow=False))
    assert [(line.source, line.text) for line in lines] == [
        ("node 0", "I am 0"),
        ("node 1", "I am 1"),
    ]
    assert [line.text for line in LOCAL.logs(job, node=1, follow=False)] == ["I am 1"]
    with pytest.raises(RequestError, match=r"no node 2. It has 2, counted from 0"):
        LOCAL.logs(job, node=2, follow=False)


@pytest.mark.heavy
def test_removing_is_repeatable_and_leaves_nothing_in_the_ledger(
    run: RunDir, job: Submission
) -> None:
    ledger = Ledger(run.path / "ledger.jsonl")
    intended = ledger.intend("local job", job.name, launcher="local", **job.details)
    ledger.confirm(intended, job.id)
    assert [entry.name for entry in ledger.live()] == ["r/job-0"]
    ended(run, 0)
    gone = replace(job, id=f"{job.id}0")
    assert LOCAL.remove(gone, ledger).removed == []
    assert ledger.live() == []
    assert LOCAL.remove(gone, ledger).removed == []
    assert LOCAL.remove(job, ledger).removed == ["local job r/job-0"]  # it runs: it is cancelled


@pytest.mark.heavy
def test_a_process_that_is_not_the_supervisor_of_the_folder_is_not_ended(run: RunDir) -> None:
    """Whoever can write the ledger knows number, start and boot of any process."""
    other = run.path.parent / "other" / "logs" / "job-0"
    with subprocess.Popen(["sleep", "60"]) as stranger, idle_supervisor(other) as of_another_run:
        for process in (stranger, of_another_run):
            who = Identity.of(process.pid)
            assert who is not None
            ledger = Ledger(run.path / "ledger.jsonl")
            folder = str(run.path / "logs" / "job-0")
            intended = ledger.intend("local job", "r/job-0", launcher="local", folder=folder)
            ledger.confirm(intended, f"{who.pid}-{who.started}", boot=who.boot)
            Path(folder).mkdir(parents=True, exist_ok=True)
            (entry,) = ledger.live()
            forged = Submission(
                launcher="local", run_id="r", id=str(entry.id), name=entry.name,
                details=entry.details,
            )  # fmt: skip
            assert LOCAL.status(forged).state is JobState.FAILED
            LOCAL.cancel(forged)
            found = LOCAL.remove(forged, ledger)
            assert found == Removal(not_owned=[f"process {who.pid}"]) and ledger.live() == []
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        stranger.kill()
        of_another_run.kill()


@pytest.mark.heavy
def test_the_supervisor_of_another_user_is_not_ended(run: RunDir) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    folder = run.path / "logs" / "job-0"
    words = ["bash", "-c", "read", "-m", "shardyard.launchers.local_job", str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, user=65534) as process:
        LOCAL.cancel(job_of(run, process.pid))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.kill()


@pytest.mark.heavy
def test_a_real_supervisor_is_known_by_its_folder_and_cancelled(run: RunDir) -> None:
    folder = run.path / "logs" / "job-0"
    folder.mkdir(parents=True)
    content = {
        "program": [sys.executable, "-c", "import time; time.sleep(60)"],
        "run_dir": str(run.path), "nodes": 1, "fewest_nodes": 1,
        "devices_per_node": 1, "env": {}, "max_restarts": 0, "drain_timeout_s": 1.0,
        "time_limit_s": None,
    }  # fmt: skip
    write_json(folder / "job.json", content)
    who = start_supervisor(folder)
    details = {"folder": str(folder), "boot": who.boot}
    job = Submission(
        launcher="local", run_id="r", id=f"{who.pid}-{who.started}", name="r/job-0", details=details
    )
    assert LOCAL.status(job).state is JobState.RUNNING
    assert LOCAL.remove(job, Ledger(run.ledger)).removed == ["local job r/job-0"]
    assert LOCAL.status(job).state is not JobState.RUNNING


@pytest.mark.heavy
def test_a_job_whose_number_was_never_written_down_is_ended_and_not_started_twice(
    run: RunDir,
) -> None:
    folder = run.path / "logs" / "job-0"
    folder.mkdir(parents=True)
    ledger = Ledger(run.ledger)
    ledger.intend("local job", "r/job-0", launcher="local", folder=str(folder))
    interrupted = Submission(
        launcher="local", run_id="r", id="", name="r/job-0", details={"folder": str(folder)}
    )
    with idle_supervisor(folder) as process:
        with pytest.raises(RequestError, match="is being trained already"):
            LOCAL.submit(LOCAL.render(request_for(run.path)), ledger)
        assert LOCAL.remove(interrupted, ledger) == Removal(removed=["local job r/job-0"])
        assert process.wait() == -signal.SIGTERM
    assert ledger.live() == []
    assert LOCAL.remove(interrupted, ledger) == Removal(), "no process supervises it"
