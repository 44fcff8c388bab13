"""The stack of a Batch queue: CloudFormation's linter, golden files, rights, mounts, interfaces."""

import email
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardyard.cluster.batch.stack import render_environment, user_data
from shardyard.cluster.fsx import FileSystemOutputs, render_stack
from shardyard.cluster.network import NetworkLocation, render_network
from shardyard.cluster.part_order import parts_of
from shardyard.cluster.spec import MOST_USER_DATA_BYTES, ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.hardware.catalogue import instance, instance_names
from tests.cluster.test_rendered import lint

RESERVATION = "cr-0123456789abcdef0"
PLACE = (
    "kind=batch", "name=trainers", "region=us-east-1", "zone=us-east-1a",
    "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0}}",
)  # fmt: skip
OWN = '#!/bin/sh\necho "${HOME} é"'
CASES: dict[str, tuple[str, ...]] = {
    "batch-p4d": (
        f"nodes={{instance: p4d.24xlarge, max: 4, user_data: {json.dumps(OWN)}}}",
        "storage={kind: fsx, size_gib: 4800, bucket: s3://my-data/imagenet}",
        "jobs={bucket: s3://my-data/runs, secrets: [hub-token]}",
    ),
    "batch-p5-32-efa": (
        f"nodes={{instance: p5.48xlarge, max: 2, capacity: 'block:{RESERVATION}'}}",
        "storage.kind=efs",
    ),
    "batch-own-network": ("nodes={instance: g5.xlarge, max: 2}",),
    "batch-g5": ("nodes={instance: g5.xlarge, max: 8, count: 1}", "storage.kind=efs"),
}
GOLDEN = Path(__file__).parent / "golden"
PLACE_MADE = NetworkLocation(vpc="vpc-0123456789abcdef0", subnet="subnet-0123456789abcdef0")
MADE = FileSystemOutputs(
    file_system="fs-0123456789abcdef0", mount_name="abcd", group="sg-0123456789abcdef0"
)
TRAINABLE = [
    name for name in instance_names() if instance(name).accelerator.device in ("cuda", "hpu")
]


def given_of(case: str) -> ClusterSpec:
    place = PLACE[:-1] if case == "batch-own-network" else PLACE
    return read_cluster_spec([*place, *CASES[case]])


def rendered(*settings: str, made: FileSystemOutputs | None = None) -> dict[str, Any]:
    given = read_cluster_spec([*PLACE, *settings])
    resources: dict[str, Any] = render_environment(given, "0" * 16, made, PLACE_MADE)["Resources"]
    return {name: one.get("Properties", {}) for name, one in resources.items()}


@pytest.mark.parametrize("case", CASES)
def test_cloudformation_takes_both_stacks(case: str) -> None:
    given = given_of(case)
    assert lint(render_environment(given, "0" * 16, MADE, PLACE_MADE)) == []
    assert lint(render_stack(given, "0" * 16)) == []
    assert lint(render_network(given, "0" * 16)) == []


def test_instances_of_a_new_network_leave_it_by_nat_and_nobody_comes_in() -> None:
    made = render_network(given_of("batch-own-network"), "0" * 16)["Resources"]
    associated = {
        one["Properties"]["SubnetId"]["Ref"]: one["Properties"]["RouteTableId"]["Ref"]
        for one in made.values()
        if one["Type"] == "AWS::EC2::SubnetRouteTableAssociation"
    }
    assert associated == {"PublicSubnet": "PublicTable", "PrivateSubnet": "PrivateTable"}
    routes = {
        one["Properties"]["RouteTableId"]["Ref"]: one["Properties"].keys()
        for one in made.values()
        if one["Type"] == "AWS::EC2::Route"
    }
    assert "NatGatewayId" in routes["PrivateTable"] and "GatewayId" not in routes["PrivateTable"]
    assert "GatewayId" in routes["PublicTable"]
    assert not any("MapPublicIpOnLaunch" in one["Properties"] for one in made.values())


def test_side_jobs_have_a_queue_of_instances_without_accelerators() -> None:
    made = rendered("nodes={instance: p5.48xlarge, max: 4}")
    side = made["SideEnvironment"]["ComputeResources"]
    assert (side["InstanceTypes"], side["MinvCpus"]) == (["m5.8xlarge"], 0)
    assert side["Ec2Configuration"] == [{"ImageType": "ECS_AL2023"}]
    assert "PlacementGroup" not in side and "NetworkInterfaces" not in made["SideTemplate"]
    assert made["SideQueue"]["JobQueueName"] == "trainers-side"


def test_the_linter_refuses_a_wrong_environment() -> None:
    template = render_environment(given_of("batch-g5"), "0" * 16, MADE, PLACE_MADE)
    template["Resources"]["Environment"]["Properties"]["ComputeResources"]["MaxvCpu"] = 1
    assert any("MaxvCpu" in problem for problem in lint(template))


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
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("machine", TRAINABLE)
def test_interfaces_are_those_of_the_catalogue(machine: str) -> None:
    made = rendered(f"nodes={{instance: {machine}, ami: ami-0123456789abcdef0}}")
    interfaces = made["Template"]["LaunchTemplateData"].get("NetworkInterfaces", [])
    count = instance(machine).efa_count
    assert [row["NetworkCardIndex"] for row in interfaces] == list(range(count))
    assert [row["DeviceIndex"] for row in interfaces] == ([0] + [1] * (count - 1) if count else [])
    assert all(row["InterfaceType"] == "efa" for row in interfaces)
    # Batch refuses groups in both places, and needs them in one.
    assert ("SecurityGroupIds" in made["Environment"]["ComputeResources"]) == (count == 0)


def test_instances_are_members_of_the_file_systems_group() -> None:
    groups = [{"Fn::GetAtt": ["Group", "GroupId"]}, MADE.group]
    with_efa = rendered("nodes.instance=p4d.24xlarge", made=MADE)["Template"]
    interfaces = with_efa["LaunchTemplateData"]["NetworkInterfaces"]
    assert all(interface["Groups"] == groups for interface in interfaces)
    without = rendered("nodes.instance=g5.xlarge", made=MADE)["Environment"]
    assert without["ComputeResources"]["SecurityGroupIds"] == groups


def test_efa_has_a_rule_of_its_own_for_each_direction() -> None:
    made = rendered("nodes.instance=p4d.24xlarge")
    itself = {"Fn::GetAtt": ["Group", "GroupId"]}
    assert made["FromItself"] == {
        "GroupId": itself, "IpProtocol": "-1", "SourceSecurityGroupId": itself,
    }  # fmt: skip
    assert made["ToItself"] == {
        "GroupId": itself, "IpProtocol": "-1", "DestinationSecurityGroupId": itself,
    }  # fmt: skip


def test_nothing_runs_while_no_job_waits_and_nothing_is_spot() -> None:
    resources = rendered("nodes={instance: p5.48xlarge, max: 4}")["Environment"]["ComputeResources"]
    assert (resources["Type"], resources["MinvCpus"], resources["MaxvCpus"]) == ("EC2", 0, 4 * 192)


def test_containers_cannot_take_the_instances_role() -> None:
    data = rendered("nodes.instance=p5.48xlarge")["Template"]["LaunchTemplateData"]
    assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_a_job_that_cannot_start_is_cancelled() -> None:
    actions = rendered("nodes.instance=g5.xlarge")["Queue"]["JobStateTimeLimitActions"]
    assert {(action["State"], action["Action"]) for action in actions} == {("RUNNABLE", "CANCEL")}
    assert all(600 <= action["MaxTimeSeconds"] <= 86400 for action in actions)


TARGET = {"CapacityReservationTarget": {"CapacityReservationId": RESERVATION}}


@pytest.mark.parametrize(
    ("capacity", "wanted"),
    [
        ("on-demand", {"CapacityReservationSpecification": {
            "CapacityReservationPreference": "none"}}),
        (f"reservation:{RESERVATION}", {"CapacityReservationSpecification": TARGET}),
        (f"block:{RESERVATION}", {"CapacityReservationSpecification": TARGET,
         "InstanceMarketOptions": {"MarketType": "capacity-block"}}),
    ],
)  # fmt: skip
def test_instances_are_rented_as_described(capacity: str, wanted: dict[str, Any]) -> None:
    made = rendered(f"nodes={{instance: p5.48xlarge, capacity: '{capacity}'}}")
    data = made["Template"]["LaunchTemplateData"]
    names = ("CapacityReservationSpecification", "InstanceMarketOptions")
    assert {name: data[name] for name in names if name in data} == wanted
    # What is reserved lies where it was reserved: a placement group of ours has no room there.
    is_placed = capacity != "on-demand"
    resources = made["Environment"]["ComputeResources"]
    assert ("Placement" in made) == ("PlacementGroup" in resources) == (not is_placed)


def statements(role: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        statement
        for policy in role.get("Policies", [])
        for statement in policy["PolicyDocument"]["Statement"]
    ]


def test_containers_may_what_their_bucket_asks_and_nothing_else() -> None:
    assert "JobRole" not in rendered("nodes.instance=g5.xlarge")
    role = rendered("nodes.instance=g5.xlarge", "jobs.bucket=s3://my-data/runs/")["JobRole"]
    listing, objects = statements(role)
    assert listing["Resource"] == [{"Fn::Sub": "arn:${AWS::Partition}:s3:::my-data"}]
    assert objects["Resource"] == [{"Fn::Sub": "arn:${AWS::Partition}:s3:::my-data/runs/*"}]
    actions = {action for one in (listing, objects) for action in one["Action"]}
    assert actions == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject",
                       "s3:AbortMultipartUpload"}  # fmt: skip


def test_who_starts_containers_may_read_the_recipes_secrets_and_no_others(tmp_path: Path) -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub-AbCdEf"
    recipe = tmp_path / "train.yaml"
    recipe.write_text(
        f"cluster: {{instance: g5.xlarge}}\nsecrets: {{A: 'aws-sm:{arn}', B: 'ssm:/team/hub'}}\n"
        "elastic: {drain_timeout_s: 300.0}\n"
    )
    made = rendered(f"recipe={recipe}")
    rights = {one["Action"][0]: one["Resource"] for one in statements(made["ExecutionRole"])}
    assert rights["secretsmanager:GetSecretValue"] == [arn]
    (parameter,) = rights["ssm:GetParameters"]
    assert parameter["Fn::Sub"].endswith(":parameter/team/hub")
    text = made["Template"]["LaunchTemplateData"]["UserData"]["Fn::Base64"]
    assert "ECS_CONTAINER_STOP_TIMEOUT=330s" in text, "the recipe's drain, and 30 s"
    plain = rendered("nodes.instance=g5.xlarge")["ExecutionRole"]
    assert not any("secretsmanager" in str(one) or "ssm" in str(one) for one in statements(plain))


def parts(text: str) -> list[tuple[str, str]]:
    """Type and content of each part of user data, as cloud-init reads it."""
    _, *found = email.message_from_bytes(text.encode()).walk()
    contents = [part.get_payload(decode=True) for part in found]
    return [
        (part.get_content_type(), content.decode())
        for part, content in zip(found, contents, strict=True)
        if isinstance(content, bytes)
    ]


def test_user_data_is_ours_the_mount_and_the_users_own_behind_them() -> None:
    (stop, mount, own) = parts(user_data(given_of("batch-p4d"), MADE, own=OWN))
    assert "ECS_CONTAINER_STOP_TIMEOUT=150s" in stop[1]
    server = "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com@tcp:/abcd"
    assert f"mount -t lustre -o relatime,flock {server} /shared" in mount[1]
    assert "systemctl mask ecs; poweroff" in mount[1], "without it no job writes on its own disk"
    assert own[1].strip() == OWN
    assert {kind for kind, _ in (stop, mount, own)} == {"text/x-shellscript"}
    efs = FileSystemOutputs(
        file_system="fs-0123456789abcdef0", mount_name="", group="sg-0123456789abcdef0"
    )
    assert len(parts(user_data(given_of("batch-g5"), efs, own=None))) == 1, "ECS mounts EFS itself"


def test_a_cloud_config_is_a_part_of_its_kind() -> None:
    own = json.dumps("#cloud-config\na: 1")
    given = read_cluster_spec([*PLACE, "nodes.instance=g5.xlarge", f"nodes.user_data={own}"])
    *_, (kind, text) = parts(user_data(given, None, own=given.nodes.user_data))
    assert (kind, text.strip()) == ("text/cloud-config", "#cloud-config\na: 1")


def test_the_largest_user_data_with_ours_is_what_ec2_takes() -> None:
    own = "#!" + "a" * (MOST_USER_DATA_BYTES - 2)
    given = read_cluster_spec([*PLACE, f"nodes={{instance: g5.xlarge, user_data: '{own}'}}"])
    assert len(user_data(given, MADE, own=own).encode()) <= 16 * 1024


def test_efs_is_reached_through_the_containers_interface() -> None:
    """With EFA that interface has the VPC's default group; without, the instances' groups."""
    with_efa = render_stack(given_of("batch-p5-32-efa"), "0" * 16)
    (rule,) = with_efa["Resources"]["Group"]["Properties"]["SecurityGroupIngress"]
    assert rule["SourceSecurityGroupId"] == {"Ref": "DefaultGroup"}
    without = render_stack(given_of("batch-g5"), "0" * 16)
    assert without["Resources"]["Group"]["Properties"]["SecurityGroupIngress"] == []
    assert set(without["Parameters"]) == {"Vpc", "Subnet"}
    for stack in (with_efa, without):
        itself = {"Fn::GetAtt": ["Group", "GroupId"]}
        assert stack["Resources"]["Clients"]["Properties"]["SourceSecurityGroupId"] == itself
