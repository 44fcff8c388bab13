"""Rendered pods really run: they meet by name, train without rights, and come and go."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import EXIT_DRAINED
from shardyard.launch.base import LaunchRequest
from shardyard.launch.kubernetes.objects import render_objects
from tests.launch.kubernetes.pods import (
    IMAGE,
    SOURCES,
    pod_of_jobset,
    running_podman,
    worker_of_pytorchjob,
)
from tests.launch.kubernetes.requests import request_for

pytestmark = pytest.mark.slow

DEADLINE_S = 200


def request_on(folder: Path, *overrides: str) -> LaunchRequest:
    """A tiny model on CPUs; the run's folder and the data are folders of this machine."""
    runs, data = folder / "runs", folder / "data"
    data.mkdir()
    for number in range(20):
        lines = [f"def f{number}_{line}(x): return x + {line}" for line in range(20)]
        (data / f"{number}.py").write_text("\n".join(lines))
    runs.mkdir()
    runs.chmod(0o777)  # a claim is made writable for the pods' group; a folder is not
    mounts = {"/runs": runs, "/data": data, **SOURCES}
    volumes = ", ".join(f"{{path: {path}, host: {host}}}" for path, host in mounts.items())
    return request_for(
        "model.preset=llama-tiny", "data.source=/data", "data.seq_len=32", "data.eval_fraction=0",
        "optim.global_batch=4", "cluster.instance=null", "cluster.device=cpu", "cluster.devices=1",
        f"launch.image={IMAGE}", f"launch.volumes=[{volumes}]",
        "launch.kubernetes.allow_host_paths=true", "launch.kubernetes.shared_memory_gib=1",
        *overrides, run_id="demo",
    )  # fmt: skip


def lines_in(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.2)


def test_two_pods_of_a_jobset_meet_by_name_and_train(tmp_path: Path) -> None:
    config, job = render_objects(request_on(tmp_path, "run.steps=6"))
    with running_podman() as podman:
        for rank in range(2):
            podman.play(config, pod_of_jobset(job, rank), domain="demo")
        containers = [f"demo-node-0-{rank}-node" for rank in range(2)]
        status = podman.run("exec", containers[0], "cat", "/proc/self/status")
        codes = [podman.wait(container, timeout_s=DEADLINE_S) for container in containers]
        said = podman.run("logs", containers[0])
    assert codes == [0, 0], said
    rights = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert rights["Uid"].split() == ["1000"] * 4
    assert (rights["CapEff"], rights["CapBnd"]) == ("0" * 16, "0" * 16)
    assert rights["NoNewPrivs"] == "1"
    metrics = lines_in(tmp_path / "runs" / "demo" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 7))
    assert {line["world_size"] for line in metrics} == {2}
    assert "@shardyard " in said  # events and metrics are in the log too


def test_workers_of_an_elastic_pytorchjob_are_killed_come_back_and_drain(tmp_path: Path) -> None:
    request = request_on(
        tmp_path, "run.steps=100000", "launch.kubernetes.target=pytorchjob",
        "elastic.min_nodes=1", "elastic.max_nodes=2", "checkpoint.every=5",
    )  # fmt: skip
    config, job = render_objects(request)
    metrics = tmp_path / "runs" / "demo" / "metrics.jsonl"

    def world_sizes() -> list[int]:
        return [line["world_size"] for line in lines_in(metrics)]

    with running_podman() as podman:
        for rank in range(2):
            podman.play(config, worker_of_pytorchjob(job, rank))
        wait_until(lambda: 2 in world_sizes(), "two workers that train")
        podman.run("pod", "rm", "--force", "--time=0", "demo-worker-1")
        wait_until(lambda: world_sizes()[-1:] == [1], "one worker that goes on")
        podman.play(config, worker_of_pytorchjob(job, 1))
        wait_until(lambda: world_sizes()[-1:] == [2], "the other one to join")
        podman.run("kill", "--signal=TERM", "demo-worker-0-pytorch")
        code = podman.wait("demo-worker-0-pytorch", timeout_s=DEADLINE_S)
        said = podman.run("logs", "demo-worker-0-pytorch")
    assert code == EXIT_DRAINED, said
    steps = {line["step"] for line in lines_in(metrics)}
    assert steps == set(range(1, max(steps) + 1))
