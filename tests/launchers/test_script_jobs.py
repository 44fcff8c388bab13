"""`shardyard launch -- python SCRIPT` for real: its losses, its end on request, and its resume.

The reference is the same loop in plain torch, in one process.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shardyard.cli import main
from shardyard.control.launch_script import script_proposal
from shardyard.control.submission import submit
from shardyard.launchers.base import JobState
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster

STEPS = 30
ROOT = Path(__file__).parents[2]
SCRIPT = f"""
import sys, time
import torch, torch.distributed as dist
from torch import nn
import shardyard

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = shardyard.wrap(model, optimizer)
rank, ranks = dist.get_rank(), dist.get_world_size()
with shardyard.run("mine", {{"lr": 0.1}}) as run:
    for step in shardyard.steps({STEPS}, run.checkpoints, model, optimizer, every=5):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=draw)[rank::ranks]
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        time.sleep(float(sys.argv[1]))
        run.log(step=step + 1, loss=loss)
print("the script is done", flush=True)
dist.destroy_process_group()
"""


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model, found = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_steps(run.metrics)]


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
    command = ("--on", "local", "--yes", "--", "python", "train.py", "0.1")
    code, said = shardyard(capsys, "launch", *where, *command)
    assert code == 0, said
    until_s = time.monotonic() + 120
    while not any(line["step"] >= 7 for line in read_lines(run.metrics)):
        assert time.monotonic() < until_s, shardyard(capsys, "logs", "job", "--all")
        time.sleep(0.1)
    assert shardyard(capsys, "cancel", "job")[0] == 0
    assert shardyard(capsys, "watch", "job")[0] == 143
    code, said = shardyard(capsys, "status", "job")
    assert "drained" in said and "SIGTERM after step" in said
    code, said = shardyard(capsys, "resume", "job", "--yes")
    assert code == 0, said
    code, said = shardyard(capsys, "watch", "job")
    assert code == 0 and "the script is done" in said
    assert losses(run) == pytest.approx(plain_losses(), rel=1e-5)
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
    assert losses(proposal.run_dir) == pytest.approx(plain_losses(), rel=1e-5)
    assert "the script is done" in lines
    started = next(e for e in read_lines(proposal.run_dir.events) if e["kind"] == "attempt_started")
    assert [worker["rank"] for worker in started["workers"]] == [0, 1]
