"""The pods of a rendered JobSet really run: they meet by name, with the rights they were given."""

import json
from pathlib import Path

import pytest

from shardyard.launch.kubernetes.objects import render_objects
from tests.launch.kubernetes.pods import IMAGE, SOURCES, pod_of_jobset, running_podman
from tests.launch.kubernetes.requests import request_for

pytestmark = pytest.mark.slow

STEPS = 6


def write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(20):
        lines = [f"def f{number}_{line}(x): return x + {line}" for line in range(20)]
        (folder / f"{number}.py").write_text("\n".join(lines))


def test_two_pods_of_a_jobset_meet_by_name_and_train(tmp_path: Path) -> None:
    runs, data = tmp_path / "runs", tmp_path / "data"
    write_text(data)
    runs.mkdir(mode=0o777)
    runs.chmod(0o777)  # a claim is made writable for the pods' group; a folder is not
    mounts = {"/runs": runs, "/data": data, **SOURCES}
    volumes = ", ".join(f"{{path: {path}, host: {host}}}" for path, host in mounts.items())
    request = request_for(
        "model.preset=llama-tiny", "data.seq_len=32", "data.eval_fraction=0", f"run.steps={STEPS}",
        "optim.global_batch=4", "cluster.instance=null", "cluster.device=cpu", "cluster.devices=1",
        f"launch.image={IMAGE}", f"launch.volumes=[{volumes}]", "data.source=/data",
        "launch.kubernetes.allow_host_paths=true", "launch.kubernetes.shared_memory_gib=1",
        run_id="demo",
    )  # fmt: skip
    config, job = render_objects(request)
    with running_podman() as podman:
        pods = [pod_of_jobset(job, rank) for rank in range(2)]
        names = [pod["metadata"]["name"] for pod in pods]
        for pod, name in zip(pods, names, strict=True):
            podman.play(config, pod, alias=f"{name}.demo")
        status = podman.run("exec", f"{names[0]}-node", "cat", "/proc/self/status")
        codes = [podman.wait(name, timeout_s=400) for name in names]
        said = podman.logs(names[0])
    assert codes == [0, 0], said
    rights = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert rights["Uid"].split() == ["1000"] * 4
    assert (rights["CapEff"], rights["CapBnd"]) == ("0" * 16, "0" * 16)
    assert rights["NoNewPrivs"] == "1"
    lines = [json.loads(line) for line in (runs / "demo" / "metrics.jsonl").read_text().split("\n")
             if line]  # fmt: skip
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["world_size"] for line in lines} == {2}
    assert "@shardyard " in said  # events and metrics are in the log too
