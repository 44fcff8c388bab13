"""What is sent to AWS Batch: golden files, botocore's own validator, the catalogue's numbers."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import LostNodeError, RequestError
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.aws_batch.requests import (
    MAX_DEFINITION_BYTES,
    RECIPE_VARIABLE,
    RETRY_RULES,
    job_definition,
    job_name,
    job_submission,
)
from shardyard.launchers.base import SideJob
from tests.launchers.batch_requests import EXECUTION_ROLE, ROLE, batch_request

GOLDEN = Path(__file__).parent / "golden" / "aws-batch"

COMBINATIONS = [
    ("llama-1b", "p3dn.24xlarge", 1),
    ("llama2-7b", "p4d.24xlarge", 2),
    ("llama2-7b", "p5.48xlarge", 2),
    ("llama2-13b", "p4de.24xlarge", 4),
    ("llama3-8b", "g5.12xlarge", 2),
    ("llama3-8b", "g6e.xlarge", 1),
    ("llama2-70b", "p5en.48xlarge", 16),
    ("llama3-70b", "p6-b200.48xlarge", 8),
    ("llama3.1-405b", "p5.48xlarge", 64),
    ("llama-1b", "dl1.24xlarge", 16),
    ("llama-tiny", "g4dn.xlarge", 1),
]

SIDE = SideJob(kind="export", arguments={"step": 7, "to": "s3://bucket/weights"})

SIDE_JOBS = {
    "side-g5.12xlarge": ["cluster.instance=g5.12xlarge", "cluster.nodes=2"],
    "side-own-queue": [
        "cluster.instance=dl1.24xlarge",
        "launch.aws_batch.side_queue=cpus",
        "launch.side={cpus: 2, memory_gib: 3}",
        "launch.time_limit=2h",
        "secrets={HF_TOKEN: ssm:/shardyard/hf-token}",
    ],
}

TRAINABLE = [
    name for name in instance_names() if instance(name).accelerator.device in ("cuda", "hpu")
]


def container(definition: dict[str, Any]) -> dict[str, Any]:
    (node_range,) = definition["nodeProperties"]["nodeRangeProperties"]
    found: dict[str, Any] = node_range["container"]
    return found


def environment(definition: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["value"] for row in container(definition)["environment"]}


def resources(definition: dict[str, Any]) -> dict[str, str]:
    return {row["type"]: row["value"] for row in container(definition)["resourceRequirements"]}


def device_paths(definition: dict[str, Any]) -> list[str]:
    return [row["hostPath"] for row in container(definition)["linuxParameters"]["devices"]]


def batch_complaints(call: str, params: dict[str, Any]) -> str:
    """What botocore's model of the service says against a call."""
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import ParamValidator

    model = session.get_service_model("batch").operation_model(call)
    return str(ParamValidator().validate(params, model.input_shape).generate_report())


@pytest.mark.parametrize(("model", "machine", "nodes"), COMBINATIONS)
def test_the_request_is_the_golden_one_and_botocore_accepts_it(
    model: str, machine: str, nodes: int
) -> None:
    request = batch_request(
        f"model.preset={model}",
        f"cluster.instance={machine}",
        f"cluster.nodes={nodes}",
        "launch.time_limit=24h",
        "secrets={HF_TOKEN: ssm:/shardyard/hf-token}",
        run_id=f"{model.replace('.', '-')}-20261121-120000-abcd",
    )
    rendered = BatchLauncher().render(request)
    golden = GOLDEN / f"{model}-{machine}-{nodes}.json"
    assert golden.read_text() == rendered.text
    for sent in json.loads(rendered.text):
        assert batch_complaints(sent["call"], sent["params"]) == ""


@pytest.mark.parametrize("name", SIDE_JOBS)
def test_a_side_job_is_a_container_that_botocore_accepts(name: str) -> None:
    request = batch_request(*SIDE_JOBS[name], run_id="llama-20261121-120000-abcd")
    rendered = BatchLauncher().render(replace(request, side=SIDE, nodes=1, cluster=None))
    golden = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(rendered.text)
    assert golden.read_text() == rendered.text
    for sent in json.loads(rendered.text):
        assert batch_complaints(sent["call"], sent["params"]) == ""


def test_golden_files_are_all_compared() -> None:
    named = {f"{model}-{machine}-{nodes}.json" for model, machine, nodes in COMBINATIONS}
    named |= {f"{name}.json" for name in SIDE_JOBS}
    assert {path.name for path in GOLDEN.glob("*.json")} == named


def test_the_text_is_the_objects_and_the_same_every_time() -> None:
    request = batch_request("cluster.instance=p5.48xlarge", "cluster.nodes=2")
    first, second = BatchLauncher().render(request), BatchLauncher().render(request)
    assert first == second
    assert json.loads(first.text) == list(first.objects)
    assert [call["call"] for call in first.objects] == ["RegisterJobDefinition", "SubmitJob"]
    assert first.target == {"region": "us-east-1"}


@pytest.mark.parametrize("name", TRAINABLE)
def test_devices_are_those_of_the_catalogue(name: str) -> None:
    definition = job_definition(batch_request(f"cluster.instance={name}"))
    machine = instance(name)
    efa = [path for path in device_paths(definition) if path.startswith("/dev/infiniband/")]
    assert efa == [f"/dev/infiniband/uverbs{number}" for number in range(machine.efa_count)]
    gpus = str(machine.count) if machine.accelerator.device == "cuda" else None
    assert resources(definition).get("GPU") == gpus
    assert resources(definition)["VCPU"] == str(machine.vcpus)
    assert int(resources(definition)["MEMORY"]) * 2**20 < machine.host_memory_bytes
    assert container(definition)["instanceType"] == name


def test_memory_is_less_than_what_nodes_of_eks_can_allocate() -> None:
    """Karpenter's table of allocatable memory, 2026-08-21."""
    for name, allocatable_mib in {"p5.48xlarge": 1938410, "p4d.24xlarge": 1082712}.items():
        definition = job_definition(batch_request(f"cluster.instance={name}"))
        assert int(resources(definition)["MEMORY"]) <= allocatable_mib


def test_gaudi_gets_its_device_files_and_no_gpu() -> None:
    definition = job_definition(batch_request("cluster.instance=dl1.24xlarge"))
    accel = [path for path in device_paths(definition) if path.startswith("/dev/accel/")]
    assert {f"/dev/accel/accel{number}" for number in range(8)} <= set(accel)
    assert {f"/dev/accel/accel_controlD{number}" for number in range(8)} <= set(accel)
    assert environment(definition)["HABANA_VISIBLE_DEVICES"] == "all"


def test_containers_have_no_more_rights_than_they_need() -> None:
    definition = job_definition(batch_request("cluster.instance=p5.48xlarge"))
    made = container(definition)
    assert "privileged" not in made
    assert {tuple(row["permissions"]) for row in made["linuxParameters"]["devices"]} == {
        ("READ", "WRITE", "MKNOD")
    }
    assert made["ulimits"] == [{"name": "memlock", "softLimit": -1, "hardLimit": -1}]
    assert made["jobRoleArn"] == ROLE
    assert made["executionRoleArn"] == EXECUTION_ROLE


def test_no_variable_of_efa_or_nccl_is_set() -> None:
    """aws-ofi-nccl, doc/efa-env-var.md: from libfabric 1.18 and plugin 1.7 on, set nothing."""
    names = environment(job_definition(batch_request("cluster.instance=p5.48xlarge")))
    assert set(names) == {RECIPE_VARIABLE}


def test_the_recipe_travels_whole_and_the_command_is_a_list() -> None:
    request = batch_request("cluster.instance=p5.48xlarge", "run.name=a-b", run_id="a-b-1")
    definition = job_definition(request)
    assert environment(definition)[RECIPE_VARIABLE] == request.recipe_text
    assert container(definition)["command"] == [
        "python", "-P", "-m", "shardyard.node.env_entry",
        "--place", "aws-batch", "--run-dir", "/runs/a-b-1",
    ]  # fmt: skip


def test_shared_memory_is_at_most_the_memory_of_the_container() -> None:
    small = job_definition(batch_request("cluster.instance=g4dn.xlarge"))
    large = job_definition(batch_request("cluster.instance=p5.48xlarge"))
    sizes = [container(made)["linuxParameters"]["sharedMemorySize"] for made in (small, large)]
    assert sizes == [int(resources(small)["MEMORY"]), 64 * 1024]


def outcome(*, exit_code: int | None, status_reason: str, reason: str = "") -> str:
    """What Batch does with a failed attempt, by the rules of its user guide (job retries)."""
    values = {
        "onExitCode": None if exit_code is None else str(exit_code),
        "onStatusReason": status_reason,
        "onReason": reason,
    }

    def matches(name: str, pattern: str) -> bool:
        value = values[name]
        if value is None:
            return False
        is_start = pattern.endswith("*")
        return value.startswith(pattern[:-1]) if is_start else value == pattern

    for rule in RETRY_RULES:
        if all(matches(name, text) for name, text in rule.items() if name != "action"):
            return rule["action"]
    return "RETRY"


@pytest.mark.parametrize(
    ("exit_code", "status_reason", "expected"),
    [
        (143, "Essential container in task exited", "RETRY"),
        (LostNodeError.exit_code, "Essential container in task exited", "RETRY"),
        (None, "Host EC2 (instance i-0123456789abcdef0) terminated.", "RETRY"),
        (1, "Essential container in task exited", "EXIT"),
        (2, "Essential container in task exited", "EXIT"),
        (3, "Essential container in task exited", "EXIT"),
        (4, "Essential container in task exited", "EXIT"),
        (130, "Essential container in task exited", "EXIT"),
        (137, "Essential container in task exited", "EXIT"),
        (None, "Task failed to start", "EXIT"),
    ],
)
def test_attempts_are_repeated_where_that_can_help(
    exit_code: int | None, status_reason: str, expected: str
) -> None:
    assert outcome(exit_code=exit_code, status_reason=status_reason) == expected


def test_batch_accepts_five_rules_at_most() -> None:
    assert len(RETRY_RULES) <= 5


def test_time_limit_is_that_of_the_recipe() -> None:
    limited = job_definition(
        batch_request("cluster.instance=p5.48xlarge", "launch.time_limit=90min")
    )
    assert limited["timeout"] == {"attemptDurationSeconds": 5400}
    assert "timeout" not in job_definition(batch_request("cluster.instance=p5.48xlarge"))


def test_secrets_are_references() -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"
    definition = job_definition(
        batch_request(
            "cluster.instance=p5.48xlarge",
            f"secrets={{HF_TOKEN: 'aws-sm:{arn}', KEY: 'aws-sm:{arn}#key', WANDB: ssm:/wandb}}",
        )
    )
    assert container(definition)["secrets"] == [
        {"name": "HF_TOKEN", "valueFrom": arn},
        {"name": "KEY", "valueFrom": f"{arn}:key::"},
        {"name": "WANDB", "valueFrom": "/wandb"},
    ]


def test_volumes_are_mounted_where_the_recipe_says() -> None:
    definition = job_definition(
        batch_request(
            "cluster.instance=p5.48xlarge",
            "launch.volumes=[{path: /runs, efs: fs-1}, {path: /fsx, host: /mnt/fsx}]",
        )
    )
    made = container(definition)
    assert made["volumes"] == [
        {
            "name": "volume-0",
            "efsVolumeConfiguration": {"fileSystemId": "fs-1", "transitEncryption": "ENABLED"},
        },
        {"name": "volume-1", "host": {"sourcePath": "/mnt/fsx"}},
    ]
    assert made["mountPoints"] == [
        {"sourceVolume": "volume-0", "containerPath": "/runs", "readOnly": False},
        {"sourceVolume": "volume-1", "containerPath": "/fsx", "readOnly": False},
    ]


def test_a_run_on_cpus_is_sized_by_its_settings() -> None:
    definition = job_definition(
        batch_request("launch.aws_batch.vcpus=4", "launch.aws_batch.memory_gib=8")
    )
    assert resources(definition) == {"VCPU": "4", "MEMORY": "8192"}
    assert "instanceType" not in container(definition)
    assert device_paths(definition) == []
    assert batch_complaints("RegisterJobDefinition", definition) == ""


def test_names_are_legal_and_differ_where_runs_differ() -> None:
    assert job_name("llama-1") == "shardyard-llama-1"
    assert job_name("a.b").startswith("shardyard-a_b-")
    assert job_name("a.b") != job_name("a_b")
    assert job_name("llama-1", 2) == "shardyard-llama-1-s2"
    assert len(job_name(63 * ".")) <= 128


REFUSED = [
    (["launch.image=null"], "launch.image is not given", "Name an image"),
    (["launch.aws_batch.queue=null"], "queue is not given", "Name one"),
    (["cluster.instance=null"], "is not given, nor is cluster.instance", "memory_gib"),
    (["launch.code=[mine]"], "a Batch job carries no files", "into the image"),
    (["cluster.file=c.yaml"], "cluster.file='c.yaml'", "cluster.instance"),
    (["launch.volumes=[{path: /runs, claim: c}]"], "names claim", "Give efs"),
    (["launch.volumes=[{path: /runs}]"], "names no file system", "Give efs"),
    (["launch.time_limit=0.5min"], "less than 60 s", "longer"),
    (["elastic.max_nodes=4"], "elastic.max_nodes=4", "cluster.nodes"),
    (["secrets={HF_TOKEN: env}"], "kept in env", "Secrets Manager"),
    (["secrets={HF_TOKEN: k8s:a/b}"], "kept in k8s", "ssm:NAME"),
    (["secrets={HF_TOKEN: aws-sm:hf}"], "aws-sm:hf is a name", "describe-secret"),
    (
        ["secrets={HF_TOKEN: ssm:/hf}", "launch.aws_batch.execution_role=null"],
        "execution_role is not given",
        "Name a role",
    ),
]


@pytest.mark.parametrize(("overrides", "what", "remedy"), REFUSED)
def test_what_batch_cannot_do_is_refused_with_the_next_step(
    overrides: list[str], what: str, remedy: str
) -> None:
    request = batch_request("cluster.instance=p4d.24xlarge", *overrides)
    with pytest.raises(RequestError) as raised:
        BatchLauncher().render(request)
    assert what in str(raised.value)
    assert remedy in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_folder_that_ends_with_the_container_is_a_warning() -> None:
    lost = batch_request("cluster.instance=p4d.24xlarge", run_dir="/tmp/llama-1")
    *_, warning = BatchLauncher().render(lost).warnings
    assert "/tmp/llama-1 is on none of launch.volumes" in warning
    assert "efs: fs-" in warning


def test_an_efs_mount_without_access_point_warns_and_with_one_goes_through_it() -> None:
    (warning,) = BatchLauncher().render(batch_request("cluster.instance=p4d.24xlarge")).warnings
    assert "launch.volumes[0] mounts all of EFS fs-0123456789abcdef0 without an access" in warning
    assert "that is root" in warning and "give its access_point: fsap-" in warning
    volume = "{path: /runs, efs: fs-0123456789abcdef0, access_point: fsap-0123456789abcdef0}"
    request = batch_request("cluster.instance=p4d.24xlarge", f"launch.volumes=[{volume}]")
    assert BatchLauncher().render(request).warnings == ()
    (group,) = job_definition(request)["nodeProperties"]["nodeRangeProperties"]
    assert group["container"]["volumes"][0]["efsVolumeConfiguration"] == {
        "fileSystemId": "fs-0123456789abcdef0",
        "transitEncryption": "ENABLED",
        "authorizationConfig": {"accessPointId": "fsap-0123456789abcdef0"},
    }


def test_a_request_above_batchs_limit_is_refused() -> None:
    """24 KiB: AWS Batch User Guide, Service quotas."""
    assert MAX_DEFINITION_BYTES == 24 * 1024
    filler = ", ".join(f"V{number}: x{number:064x}" for number in range(300))
    request = batch_request("cluster.instance=p4d.24xlarge", f"launch.env={{{filler}}}")
    with pytest.raises(RequestError, match="24,576") as raised:
        job_definition(request)
    assert "files of the image" in str(raised.value)


def test_the_submission_names_the_definition_of_the_run() -> None:
    request = batch_request("cluster.instance=p4d.24xlarge", run_id="llama.1")
    sent = job_submission(request)
    assert sent["jobDefinition"] == job_definition(request)["jobDefinitionName"]
    assert sent["jobQueue"] == "trainers"


def test_tags_and_attributes_of_the_site_are_passed_on() -> None:
    request = batch_request(
        "cluster.instance=p4d.24xlarge",
        "launch.aws_batch.tags={Cost Center: 'a/b'}",
        "launch.aws_batch.share_identifier=nlp",
        "launch.aws_batch.scheduling_priority=7",
    )
    sent = job_submission(request)
    assert (sent["shareIdentifier"], sent["schedulingPriorityOverride"]) == ("nlp", 7)
    assert sent["tags"]["Cost Center"] == "a/b" == job_definition(request)["tags"]["Cost Center"]
    assert batch_complaints("SubmitJob", sent) == ""


def test_tags_of_the_run_are_resource_tags_that_botocore_accepts() -> None:
    request = batch_request("cluster.instance=p4d.24xlarge", "run.tags={team: nlp}")
    for call, sent in (
        ("RegisterJobDefinition", job_definition(request)),
        ("SubmitJob", job_submission(request)),
    ):
        assert sent["tags"] == {"team": "nlp", "shardyard-run": "llama-1"}
        assert sent["propagateTags"] and batch_complaints(call, sent) == ""
