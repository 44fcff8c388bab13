"""What is sent: against eksctl's own schema and CloudFormation's linter, and as golden files."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from shardyard.cli import main
from shardyard.cluster.eksctl import render_cluster, render_nodes
from shardyard.cluster.fsx import (
    FileSystemOutputs,
    file_system_outputs,
    render_claim,
    render_root_job,
    render_stack,
)
from shardyard.cluster.part_order import parts_of
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec, Vpc
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.launchers.kubernetes.pod import pod_security
from tests.launchers.kubernetes.schemas import check_builtin

PLACE = ("name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b")
RESERVATION = "cr-0123456789abcdef0"
VPC = (
    "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0,"
    " us-east-1b: subnet-0123456789abcdef1}}"
)
CASES: dict[str, tuple[str, ...]] = {
    "p4de-reservation": (
        f"nodes={{instance: p4de.24xlarge, count: 2, capacity: 'reservation:{RESERVATION}'}}",
        "storage={kind: fsx, size_gib: 4800, bucket: s3://my-data/imagenet}",
    ),
    "p5-32-efa": (
        f"nodes={{instance: p5.48xlarge, capacity: 'block:{RESERVATION}'}}",
        "storage.kind=efs",
        VPC,
    ),
    "g5": ("nodes={instance: g5.xlarge, capacity: spot, max: 8}",),
    "p3": ("nodes={instance: p3.8xlarge, ami: ami-0123456789abcdef0}",),
    "dl1": ("nodes={instance: dl1.24xlarge, ami: ami-0123456789abcdef0}",),
}
GOLDEN = Path(__file__).parent / "golden"


def given_of(case: str) -> ClusterSpec:
    return read_cluster_spec([*PLACE, *CASES[case]])


@pytest.fixture(scope="module")
def eksctl() -> Draft7Validator:
    folder = os.environ.get("SHARDYARD_CRDS")
    if not folder:
        pytest.skip("SHARDYARD_CRDS does not name a folder with eksctl.schema.json")
    return Draft7Validator(json.loads((Path(folder) / "eksctl.schema.json").read_text()))


@pytest.mark.parametrize("case", CASES)
def test_eksctl_takes_both_files(case: str, eksctl: Draft7Validator) -> None:
    given = given_of(case)
    for rendered in (render_cluster(given, "0" * 16), render_nodes(given, "0" * 16)):
        assert [error.message for error in eksctl.iter_errors(rendered)] == []


@pytest.mark.parametrize("case", CASES)
def test_eksctl_takes_the_group_that_is_added_to_a_cluster(
    case: str, eksctl: Draft7Validator
) -> None:
    given = added_to_a_cluster(case)
    rendered = render_nodes(given, "0" * 16)
    assert [error.message for error in eksctl.iter_errors(rendered)] == []
    assert rendered["vpc"] == {
        "id": "vpc-0123456789abcdef0",
        "securityGroup": "sg-0123456789abcdef0",
        "subnets": {"private": {"us-east-1a": {"id": "subnet-0123456789abcdef0"}}},
    }


def added_to_a_cluster(case: str) -> AdoptedCluster:
    asked = given_of(case).model_copy(update={"other_zone": None})
    values = {name: getattr(asked, name) for name in ClusterSpec.model_fields}
    network = Vpc(id="vpc-0123456789abcdef0", subnets={"us-east-1a": "subnet-0123456789abcdef0"})
    return AdoptedCluster(
        **{**values, "vpc": network},
        arn="arn:aws:eks:us-east-1:123456789012:cluster/trainers",
        control_group="sg-0123456789abcdef0",
        node_group="sg-0123456789abcdef1",
        adds=("file system", "accelerators nodes"),
        asked=asked,
    )


def test_cloudformation_takes_the_file_system_of_a_cluster_that_was_there() -> None:
    template = render_stack(added_to_a_cluster("p4de-reservation"), "0" * 16)
    assert lint(template) == []
    assert set(template["Parameters"]) == {"Vpc", "Subnet", "NodeGroup"}


def test_the_schema_refuses_what_eksctl_does_not_know(eksctl: Draft7Validator) -> None:
    rendered = render_nodes(given_of("g5"), "0" * 16)
    rendered["managedNodeGroups"][0]["efaEnable"] = True
    assert [error.message for error in eksctl.iter_errors(rendered)] != []


@pytest.mark.parametrize("case", ["p4de-reservation", "p5-32-efa"])
def test_cloudformation_takes_the_stack(case: str) -> None:
    problems = lint(render_stack(given_of(case), "0" * 16))
    assert problems == []


def test_the_linter_refuses_a_wrong_stack() -> None:
    template = render_stack(given_of("p4de-reservation"), "0" * 16)
    template["Resources"]["FileSystem"]["Properties"]["StorageCapacty"] = 1
    assert any("StorageCapacty" in problem for problem in lint(template))


def lint(template: dict[str, Any]) -> list[str]:
    return list(lint_text(json.dumps(template)))


@cache
def lint_text(template: str) -> tuple[str, ...]:
    """What is wrong with it; parts that many clusters have alike are looked at once."""
    from cfnlint.api import ManualArgs
    from cfnlint.api import lint as run

    found = run(template, config=ManualArgs(regions=["us-east-1"]))
    return tuple(str(problem) for problem in found if not problem.rule.id.startswith("I"))


@pytest.mark.parametrize("case", ["p4de-reservation", "p5-32-efa"])
def test_kubernetes_takes_the_claim(case: str) -> None:
    made = FileSystemOutputs(file_system="fs-0123456789abcdef0", mount_name="abcd")
    volume, claim = render_claim(given_of(case), made, "0" * 16)
    check_builtin(volume)
    check_builtin(claim)
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


@pytest.mark.parametrize("case", CASES)
def test_the_dry_run_is_as_it_was(case: str) -> None:
    """UPDATE_GOLDEN=1 writes it instead."""
    given = given_of(case)
    text = "".join(
        f"# {part.kind} {part.name(given)}\n{part.text(given, 'OWNER')}\n"
        for part in parts_of(given)
    )
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_a_dry_run_prints_one_stream_of_documents_and_the_price_beside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["cluster", "create", "name=trainers", "region=us-east-1", "zone=us-east-1a",
             "other_zone=us-east-1b", "nodes={instance: p4d.24xlarge, count: 1}",
             "storage={kind: fsx, mb_per_s_per_tib: 125}"]  # fmt: skip
    assert main([*words, "--dry-run", "--hours", "30"]) == 0
    said = capsys.readouterr()
    documents = [one for one in yaml.safe_load_all(said.out) if one]
    groups = [group["name"] for one in documents for group in one.get("managedNodeGroups", ())]
    assert groups == ["system", "accelerators"]
    assert "in 30 h: $" in said.err and "1 x p4d.24xlarge, on-demand: $21.96 an hour" in said.err


def test_a_capacity_block_takes_a_group_of_eksctls_own() -> None:
    (group,) = render_nodes(given_of("p5-32-efa"), "0" * 16)["nodeGroups"]
    assert group["instanceMarketOptions"] == {"marketType": "capacity-block"}
    assert group["capacityReservation"]["capacityReservationTarget"] == {
        "capacityReservationID": RESERVATION
    }


def test_pods_that_want_a_reservation_find_its_nodes() -> None:
    (group,) = render_nodes(given_of("p4de-reservation"), "0" * 16)["managedNodeGroups"]
    assert group["labels"]["shardyard/capacity-reservation"] == RESERVATION


def test_nodes_with_efa_stand_in_one_zone() -> None:
    (group,) = render_nodes(given_of("p4de-reservation"), "0" * 16)["managedNodeGroups"]
    assert group["efaEnabled"] is True
    assert group["availabilityZones"] == ["us-east-1a"]


def test_pods_can_write_what_the_cluster_makes_on_efs() -> None:
    """EFS leaves fsGroup alone, and its root belongs to root: an access point of the pods' user."""
    given = given_of("p5-32-efa")
    assert given.storage.kind == "efs"
    point = render_stack(given, "0" * 16)["Resources"]["AccessPoint"]["Properties"]
    user = str(pod_security()["runAsUser"])
    assert point["PosixUser"] == {"Uid": user, "Gid": user}
    assert point["RootDirectory"]["CreationInfo"]["OwnerUid"] == user
    made = file_system_outputs({"FileSystem": "fs-0", "AccessPoint": "fsap-0"})
    volume, _ = render_claim(given, made, "0" * 16)
    # aws-efs-csi-driver, examples/kubernetes/access_points: [FileSystemId]::[AccessPointId]
    assert volume["spec"]["csi"]["volumeHandle"] == "fs-0::fsap-0"


def test_the_first_pod_on_fsx_finds_a_root_whose_files_nobody_has_to_change() -> None:
    """OnRootMismatch leaves a root with the group's id, rwx for it and setgid: volume_linux.go."""
    given = given_of("p4de-reservation")
    assert given.storage.kind == "fsx"
    job = render_root_job(given, "0" * 16)
    pod = job["spec"]["template"]["spec"]
    assert "securityContext" not in pod, "an fsGroup of its own would change every file"
    (container,) = pod["containers"]
    group = pod_security()["fsGroup"]
    assert container["command"][2] == f"chgrp {group} /shared && chmod 2775 /shared"
    assert pod_security()["fsGroupChangePolicy"] == "OnRootMismatch"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": given.storage.claim}
