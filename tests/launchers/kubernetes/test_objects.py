"""Every kind of request as a file to read, and against the schema of its API version."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardyard.launchers.base import SideJob
from shardyard.launchers.bundle import Bundle
from shardyard.launchers.kubernetes.objects import render_objects, to_yaml
from shardyard.launchers.kubernetes.targets import Schema, for_schema
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.kubernetes.schemas import check_builtin, check_object, check_pod, pod_of

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"

TARGETS: dict[str, tuple[str, Schema]] = {
    "jobset": ("jobset", "2.3"),
    "trainjob-2.1": ("trainjob", "2.1"),
    "trainjob-2.3": ("trainjob", "2.3"),
    "pytorchjob": ("pytorchjob", "2.3"),
}

MACHINES = [
    ("llama-1b", "g5.12xlarge", 2),
    ("llama2-7b", "p4d.24xlarge", 2),
    ("llama3-8b", "p5.48xlarge", 4),
    ("llama3-70b", "p5en.48xlarge", 16),
    ("llama3.1-405b", "p6-b200.48xlarge", 64),
    ("bert-1.5b", "dl1.24xlarge", 8),
    ("llama3.2-1b", "g6.xlarge", 1),
]

SPECIAL = {
    "jobset-kueue": [
        "launch.kubernetes.queue=team",
        "launch.kubernetes.topology=preferred",
        "launch.kubernetes.priority_class=high",
        "launch.time_limit=36h",
    ],
    "jobset-one-zone": [
        "launch.kubernetes.queue=team",
        "launch.kubernetes.topology=required",
        "launch.kubernetes.node_selector={pool: train}",
        "launch.kubernetes.tolerations=[reserved=train:NoSchedule, spot]",
        "launch.kubernetes.service_account=trainer",
    ],
    "jobset-secrets": [
        "secrets.HF_TOKEN=k8s:hugging-face/token",
        "secrets.WANDB_API_KEY=k8s:wandb/key",
        "launch.env={HF_HUB_OFFLINE: '0'}",
    ],
    "jobset-no-efa": ["launch.kubernetes.efa=0"],
    "jobset-cpu": ["cluster.instance=null", "cluster.device=cpu", "cluster.devices=2"],
    "jobset-half-a-node": ["cluster.devices=4", "launch.kubernetes.efa=16"],
    "pytorchjob-elastic": [
        "launch.kubernetes.target=pytorchjob",
        "elastic.min_nodes=1",
        "elastic.max_nodes=64",
        "launch.time_limit=90min",
        "launch.kubernetes.priority_class=high",
    ],
    "pytorchjob-etcd": ["launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=etcd:2379"],
    "trainjob-limit": ["launch.kubernetes.target=trainjob", "launch.time_limit=2d"],
}


SIDE = SideJob(kind="export", arguments={"step": 7, "to": "/runs/$HOME"})

SIDE_JOBS = {
    "side": [],
    "side-trainjob": [
        "launch.kubernetes.target=trainjob",
        "launch.side={cpus: 2, memory_gib: 3}",
        "launch.kubernetes.side_node_selector={pool: cpus}",
        "launch.kubernetes.node_selector={pool: train}",
        "launch.kubernetes.queue=team",
        "launch.kubernetes.topology=required",
        "launch.kubernetes.service_account=trainer",
        "launch.time_limit=36h",
        "secrets.HF_TOKEN=k8s:hugging-face/token",
    ],
}


def compare(name: str, text: str) -> None:
    """Against the golden file; UPDATE_GOLDEN=1 writes it instead."""
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"UPDATE_GOLDEN=1 writes {path.name} anew"


def check_all(objects: tuple[dict[str, object], ...], *, trainer: Schema = "2.3") -> None:
    for item in objects:
        check_object(item, trainer=trainer)
    check_pod(pod_of(objects))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("preset", "instance", "nodes"), MACHINES, ids=lambda value: str(value))
def test_a_model_on_a_machine_by_each_target(
    preset: str, instance: str, nodes: int, target: str
) -> None:
    setting, schema = TARGETS[target]
    request = request_for(
        f"model.preset={preset}", f"cluster.instance={instance}", f"cluster.nodes={nodes}",
        f"launch.kubernetes.target={setting}",
    )  # fmt: skip
    *others, job = render_objects(request)
    if setting == "trainjob":
        job = for_schema(job, schema)
    objects = (*others, job)
    compare(f"{target}-{instance}", to_yaml(objects))
    check_all(objects, trainer=schema)


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_wish(name: str) -> None:
    objects = render_objects(request_for(*SPECIAL[name]))
    compare(name, to_yaml(objects))
    check_all(objects)


@pytest.mark.parametrize("name", SIDE_JOBS)
def test_a_side_job_is_a_plain_job_whatever_the_target(name: str) -> None:
    request = replace(request_for(*SIDE_JOBS[name]), side=SIDE, nodes=1, cluster=None)
    config, job = render_objects(request)
    compare(name, to_yaml((config, job)))
    for item in (config, job):
        check_builtin(item)
    check_pod(job["spec"]["template"])


@pytest.mark.parametrize("target", TARGETS)
def test_tags_of_the_run_are_labels_of_all_objects_and_pods(target: str) -> None:
    setting, schema = TARGETS[target]
    objects = render_objects(
        request_for(f"launch.kubernetes.target={setting}", "run.tags={team: nlp}")
    )
    for item in objects:
        if item["kind"] != "ClusterTrainingRuntime":  # many runs share it
            assert item["metadata"]["labels"]["team"] == "nlp"
    pod = pod_of(objects)["metadata"]["labels"]
    assert pod["team"] == "nlp" and pod["app.kubernetes.io/name"] == "shardyard"
    *others, job = objects
    check_all((*others, for_schema(job, schema) if setting == "trainjob" else job), trainer=schema)


def test_code_travels_in_the_config_map_under_its_digest() -> None:
    code = Bundle(digest="0123456789abcdef" * 4, archive=b"an archive", files=2)
    objects = render_objects(replace(request_for("launch.code=[mine]"), code=code))
    compare("jobset-code", to_yaml(objects))
    check_all(objects)


_TRUTHS_AND_NUMBERS = re.split(
    " ",
    "y Y n N yes Yes no NO on Off true False null Null ~ 1 -1 +1 0x1F 0o17 017 0b1 1_000 1e3 1E5 "
    "-1e+3 5e-1 .5 -.5 1. 1.0 .inf -.Inf .nan 12:30:45 2026-01-02 07e3",
)
"""What a reader of YAML 1.1 or 1.2 takes for no text: yaml.org/type, and section 10.3 of 1.2."""


@pytest.mark.parametrize("text", _TRUTHS_AND_NUMBERS)
def test_a_value_that_reads_as_a_number_is_quoted_for_every_parser(text: str) -> None:
    request = request_for(f"launch.env={{WORD: '{text}'}}")
    lines = to_yaml(render_objects(request)).splitlines()
    place = next(i for i, line in enumerate(lines) if line.endswith("name: WORD"))
    assert lines[place + 1].strip() == f"value: '{text}'"


def test_there_is_no_golden_file_that_nothing_renders() -> None:
    known = {f"{target}-{row[1]}" for target in TARGETS for row in MACHINES} | set(SPECIAL)
    known |= {"jobset-code", *SIDE_JOBS}
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == known
    assert len(known) >= 30


def test_the_stream_reads_back_as_the_objects() -> None:
    objects = render_objects(request_for())
    assert tuple(yaml.safe_load_all(to_yaml(objects))) == objects


def test_the_job_inside_a_jobset_is_a_job_of_kubernetes() -> None:
    job = render_objects(request_for())[-1]
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    meta = {"name": "node"}
    check_builtin({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": inner})


def test_a_field_that_the_schema_does_not_know_is_found() -> None:
    job = render_objects(request_for())[-1]
    job["spec"]["metrics"] = []
    with pytest.raises(AssertionError, match="metrics"):
        check_object(job)


def test_fields_of_one_trainer_version_are_refused_by_the_other() -> None:
    job = render_objects(request_for("launch.kubernetes.target=trainjob"))[-1]
    with pytest.raises(AssertionError, match="runtimePatches"):
        check_object(job, trainer="2.1")
    with pytest.raises(AssertionError, match="podTemplateOverrides"):
        check_object(for_schema(job, "2.1"), trainer="2.3")
