"""Pods of a job run a script of a user's own, with the losses of plain torch after a lost pod.

`test_pods.py` has pods that train a recipe.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.pod_runs import OVERRIDES
from tests.launchers.kubernetes.pods import Podman, pod_of_jobset, running_podman
from tests.launchers.launched_script import (
    SCRIPT,
    WAIT_AT_STEP,
    assert_losses_are_those_of_plain_torch,
)

pytestmark = pytest.mark.slow


def rendered(folder: Path, run_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and job of a script, as `shardyard launch --dry-run` prints them."""
    (folder / "train.py").write_text(SCRIPT)
    words = ["--on=kubernetes", "--dry-run", f"run.id={run_id}", *OVERRIDES]
    words += ["cluster.nodes=2", "cluster.device=cpu", "launch.code=[train.py]"]
    command = [sys.executable, "-m", "shardyard", "launch", *words, "--", "python", "train.py", "2"]
    text = subprocess.check_output(command, cwd=folder, stderr=subprocess.DEVNULL, text=True)
    config, *_, job = yaml.safe_load_all(text)
    return config, job


def start(podman: Podman, config: dict[str, Any], job: dict[str, Any], number: int) -> None:
    for rank in range(2):
        podman.play(config, pod_of_jobset(job, rank, start=number), domain=job["metadata"]["name"])


def test_pods_run_a_script_also_after_a_loss(tmp_path: Path) -> None:
    config, job = rendered(tmp_path, "mine")
    with running_podman() as podman:
        podman.build()
        run = RunDir(podman.make_volume() / "mine")
        start(podman, config, job, 1)
        until_s = time.monotonic() + 300
        while not any(line["step"] >= WAIT_AT_STEP for line in read_lines(run.metrics)):
            assert time.monotonic() < until_s, podman.run("logs", "mine-node-0-0-node")
            time.sleep(0.1)
        podman.kill("mine-node-0-1")  # JobSet then starts both again
        podman.kill("mine-node-0-0")
        start(podman, config, job, 2)
        for rank in range(2):
            name = f"mine-node-0-{rank}-node"
            assert podman.wait(name, timeout_s=300) == 0, podman.run("logs", name)
        assert_losses_are_those_of_plain_torch(run)
        lines = read_steps(run.metrics)
        assert {(line["attempt"], line["world_size"]) for line in lines} == {(0, 2), (1, 2)}
        logs = podman.run("logs", "mine-node-0-0-node")
        assert "the script is done" in logs and "@shardyard:" in logs
