"""`shardyard launch -- python SCRIPT` for real: its losses, its end on request, and its resume.

The reference is the same loop in plain torch, in one process.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.control.launch_script import script_proposal
from shardyard.control.submission import submit
from shardyard.launchers.base import JobState
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.launched_script import (
    SCRIPT,
    WAIT_AT_STEP,
    assert_losses_are_those_of_plain_torch,
)
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for name, value in (
        ("PYTHONPATH", path), ("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    return tmp_path


Captured = pytest.CaptureFixture[str]


def shardyard(captured: Captured, *words: str) -> tuple[int, str]:
    """Exit code and output of a command line."""
    code = main([*words])
    found = captured.readouterr()
    return code, found.out + found.err


@pytest.mark.slow
def test_a_local_job_is_cancelled_and_resumed(folder: Path, capsys: Captured) -> None:
    run = RunDir(folder / "runs" / "job")
    where = ("cluster.device=cpu", "cluster.devices=1", "cluster.nodes=2", "run.id=job")
    command = ("--on", "local", "--yes", "--", "python", "train.py", "2")
    code, said = shardyard(capsys, "launch", *where, *command)
    assert code == 0, said
    until_s = time.monotonic() + 120
    while not any(line["step"] >= WAIT_AT_STEP for line in read_lines(run.metrics)):
        assert time.monotonic() < until_s, shardyard(capsys, "logs", "job", "--all")
        time.sleep(0.1)
    assert shardyard(capsys, "cancel", "job")[0] == 0
    code, said = shardyard(capsys, "watch", "job")
    assert code == 143 and "Traceback" not in said
    code, said = shardyard(capsys, "status", "job")
    assert "drained" in said and "SIGTERM after step" in said
    code, said = shardyard(capsys, "resume", "job", "--yes")
    assert code == 0, said
    code, said = shardyard(capsys, "watch", "job")
    assert code == 0 and "the script is done" in said
    assert_losses_are_those_of_plain_torch(run)
    assert {line["world_size"] for line in read_steps(run.metrics)} == {2}
    assert {line["attempt"] for line in read_steps(run.metrics)} == {0, 1}
    assert "succeeded" in shardyard(capsys, "status", "job")[1]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_job_of_slurm_runs_the_script_on_its_nodes(cluster: SlurmCluster) -> None:
    launcher = SlurmLauncher(shell=cluster.shell)
    settings = [
        "cluster.device=cpu", "cluster.devices=1", "cluster.nodes=2", "run.id=job",
        f"launch.env={{PYTHONPATH: '{ROOT / 'src'}', OMP_NUM_THREADS: '1'}}",
    ]  # fmt: skip
    proposal = script_proposal(settings, ("python", "train.py", "0"), launcher)
    job = submit(proposal)
    cluster.wait_until(lambda: launcher.status(job).state.is_over, "the end of the job")
    lines = [line.text for line in launcher.logs(job, node=None, follow=False)]
    assert launcher.status(job).state is JobState.SUCCEEDED, "\n".join(lines)
    assert_losses_are_those_of_plain_torch(proposal.run_dir)
    assert "the script is done" in lines
    started = next(e for e in read_lines(proposal.run_dir.events) if e["kind"] == "attempt_started")
    assert [worker["rank"] for worker in started["workers"]] == [0, 1]
