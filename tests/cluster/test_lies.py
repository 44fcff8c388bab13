"""Each lie of a service makes delete exit 1 and is named; what is foreign is neither."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.cluster import delete as removal
from shardyard.cluster.clients import World
from shardyard.cluster.create import make
from shardyard.cluster.delete import FinalState, remove
from shardyard.cluster.orphans import Swept
from shardyard.cluster.part import ClusterPart
from tests.cluster.clients import TOLD, client_of, playing_aws
from tests.cluster.lies import LIES, Case, Lie, case_of, lustre, tell
from tests.cluster.test_batch_life import open_default_group

pytestmark = pytest.mark.heavy

FAST = {"poll_s": 0.0, "limit_s": 0.0}
TWO = "trainers-two"
"""A cluster of somebody else, whose name begins as ours does."""


@pytest.fixture(autouse=True)
def aws() -> Iterator[None]:
    with playing_aws():
        open_default_group()
        yield


Delete = Callable[[Case], tuple[int, str]]


@pytest.fixture
def delete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Delete:
    """The command, in no time: its exit code, and what it said."""

    def run(case: Case) -> tuple[int, str]:
        monkeypatch.setattr("shardyard.cli.cluster.world_named", lambda *_: case.world)
        in_no_time = partial(remove, poll_s=FAST["poll_s"], limit_s=FAST["limit_s"])
        monkeypatch.setattr("shardyard.cli.cluster.remove", in_no_time)
        capsys.readouterr()
        words = ["--yes", "--delete-data", "shardyard-trainers-storage"]
        code = main(["cluster", "delete", "trainers", *words])
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


def stands(on: str, folder: Path) -> Case:
    case = case_of(on, folder)
    make(case.world, **FAST)
    return case


def foreign_things() -> dict[str, str]:
    """One of several kinds, each as somebody else's cluster of a longer name has it."""
    ec2 = client_of("ec2")
    tags = [{"Key": f"kubernetes.io/cluster/{TWO}", "Value": "owned"},
            {"Key": "shardyard-cluster", "Value": TWO}]  # fmt: skip
    named = [{"ResourceType": "volume", "Tags": tags}]
    volume = ec2.create_volume(AvailabilityZone="us-east-1a", Size=8, TagSpecifications=named)
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.1.0/24")["Subnet"]["SubnetId"]
    interface = ec2.create_network_interface(SubnetId=subnet)["NetworkInterface"]
    body = '{"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}'
    make_stack = client_of("cloudformation").create_stack
    make_stack(StackName=f"shardyard-{TWO}-batch", TemplateBody=body)
    make_stack(StackName=f"eksctl-{TWO}-cluster", TemplateBody=body, Tags=tags)
    iam = client_of("iam")
    iam.create_role(RoleName=f"eksctl-{TWO}-x", AssumeRolePolicyDocument="{}", Tags=tags)
    client_of("logs").create_log_group(logGroupName=f"/aws/eks/{TWO}/cluster")
    client_of("logs").create_log_group(logGroupName=f"/shardyard/{TWO}")
    return {"volume": volume["VolumeId"], "interface": interface["NetworkInterfaceId"]}


def see_untouched(things: dict[str, str]) -> None:
    TOLD.clear()  # here moto's own word counts
    ec2 = client_of("ec2")
    assert ec2.describe_volumes(VolumeIds=[things["volume"]])["Volumes"]
    found = ec2.describe_network_interfaces(NetworkInterfaceIds=[things["interface"]])
    assert found["NetworkInterfaces"]
    stacks = client_of("cloudformation").describe_stacks()["Stacks"]
    assert {stack["StackName"] for stack in stacks} >= {
        f"shardyard-{TWO}-batch", f"eksctl-{TWO}-cluster",
    }  # fmt: skip
    assert client_of("iam").get_role(RoleName=f"eksctl-{TWO}-x")["Role"]
    groups = client_of("logs").describe_log_groups()["logGroups"]
    assert {group["logGroupName"] for group in groups} >= {
        f"/aws/eks/{TWO}/cluster", f"/shardyard/{TWO}",
    }  # fmt: skip


def is_shown(row: Lie, code: int, said: str) -> bool:
    return code == 1 and re.search(row.named, said) is not None


def test_there_are_at_least_25_of_them() -> None:
    assert len(LIES) >= 25 and LIES.keys() > QUICK


QUICK = {
    "a deletion of nodes that says done and was never begun",
    "a stack that is gone when it is looked for, and back later",
    "a refusal that reads as an absence",
    "an untagged network interface",
    "a load balancer that its tags alone give away",
    "a log group behind an empty page",
    "a list that is refused",
    "an answer without a list",
}
"""One row of each way to look; the others take as long and are of the system half."""
ROWS = [
    pytest.param(row, id=what, marks=() if what in QUICK else pytest.mark.system)
    for what, row in LIES.items()
]
ON = [
    pytest.param(on, marks=() if on == "eks" else pytest.mark.system)
    for on in sorted({row.on for row in LIES.values()})
]


@pytest.mark.parametrize("on", ON)
def test_without_a_lie_nothing_is_left_and_nothing_foreign_named(
    tmp_path: Path, delete: Delete, on: str
) -> None:
    case, things = stands(on, tmp_path), foreign_things()
    code, said = delete(case)
    assert (code, "all of trainers in us-east-1 is removed" in said) == (0, True), said
    assert TWO not in said
    see_untouched(things)


@pytest.mark.parametrize("row", ROWS)
def test_each_lie_makes_delete_exit_1_and_is_named(
    tmp_path: Path, delete: Delete, row: Lie
) -> None:
    case, things = stands(row.on, tmp_path), foreign_things()
    row.begin(case)
    code, said = delete(case)
    assert is_shown(row, code, said), (code, said)
    assert TWO not in said and not any(id in said for id in things.values()), said
    assert "all of trainers in us-east-1 is removed" not in said
    see_untouched(things)


def trust_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that takes each program's word, looks at nothing and asks nobody what is left."""

    def take_down(parts: list[ClusterPart], world: World, **_: float) -> list[str]:
        for part in parts:
            if not part.goes_with_cluster:
                part.remove(world)
        return []

    def look(part: ClusterPart, world: World) -> FinalState:
        return FinalState(part=part.name(world.spec), word="absent", asked="nobody", unix_s=0.0)

    monkeypatch.setattr(removal, "_remove_parts", take_down)
    monkeypatch.setattr(removal, "_final_state", look)
    monkeypatch.setattr(removal, "sweep", lambda _, **__: Swept(orphans=(), failed_queries=()))


@pytest.mark.system
@pytest.mark.parametrize("row", LIES.values(), ids=LIES)
def test_whoever_trusts_everybody_is_caught_by_no_row(
    tmp_path: Path, delete: Delete, monkeypatch: pytest.MonkeyPatch, row: Lie
) -> None:
    """So each row can fail: it is the looking that names the lie, and nothing else."""
    case = stands(row.on, tmp_path)
    row.begin(case)
    trust_everybody(monkeypatch)
    code, said = delete(case)
    assert not is_shown(row, code, said)
    assert code == 0, said


@pytest.mark.system
@pytest.mark.parametrize(
    "what", ["a log group behind an empty page", "a tagged thing behind a page of others"]
)
def test_who_reads_the_first_page_alone_is_caught_by_the_rows_of_pages(
    tmp_path: Path, delete: Delete, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    real = World.pages
    monkeypatch.setattr(World, "pages", lambda *a, **k: iter([next(real(*a, **k))]))
    case = stands("eks", tmp_path)
    LIES[what].begin(case)
    code, _ = delete(case)
    assert code == 0


def test_what_the_tagging_service_still_tells_of_is_not_left_where_its_own_service_knows_better(
    tmp_path: Path, delete: Delete
) -> None:
    case = stands("eks", tmp_path)
    arn = "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0"
    told = {"ResourceTagMappingList": [{"ResourceARN": arn, "Tags": case.ours}]}
    tell("resourcegroupstaggingapi", "GetResources", told)
    code, said = delete(case)
    assert (code, "instance" in said) == (0, False), said


def test_what_is_told_late_of_what_is_gone_is_asked_again(
    tmp_path: Path, delete: Delete, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = stands("eks", tmp_path)
    looks: list[Any] = []

    def late(params: dict[str, Any]) -> dict[str, Any] | None:
        looks.append(params)
        gone = {"NatGatewayId": "nat-1", "State": "deleting", "VpcId": case.vpc}
        return {"NatGateways": [gone]} if len(looks) == 1 else None

    TOLD["ec2", "DescribeNatGateways"] = late
    monkeypatch.setitem(FAST, "limit_s", 5.0)
    code, said = delete(case)
    assert code == 0, said
    assert len(looks) == 3, "one that tells of it, and two running that do not"


def test_a_part_that_was_removed_before_is_looked_at_again(tmp_path: Path, delete: Delete) -> None:
    case = stands("eks", tmp_path)
    assert delete(case)[0] == 0
    assert case.world.ledger.live() == []
    _, said = delete(case)
    assert "control plane eksctl-trainers-cluster absent" in said
    assert "accelerators nodes eksctl-trainers-nodegroup-accelerators absent" in said


def test_exports_are_waited_for_and_one_that_failed_is_told(
    tmp_path: Path, delete: Delete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAST, "limit_s", 0.1)
    case = stands("eks with lustre", tmp_path)
    usual = {"FileSystemId": lustre(case), "Type": "EXPORT_TO_REPOSITORY"}
    states = iter(["PENDING", "EXECUTING", "FAILED", "FAILED"])

    def tasks(_params: dict[str, Any]) -> dict[str, Any]:
        state = next(states)
        before = {"TaskId": "task-1", "CreationTime": 1, "Lifecycle": "SUCCEEDED", **usual}
        newest = {"TaskId": "task-2", "CreationTime": 2, "Lifecycle": state, **usual}
        return {"DataRepositoryTasks": [newest, before]}

    TOLD["fsx", "DescribeDataRepositoryTasks"] = tasks
    _, said = delete(case)
    waited = "waiting for what shardyard-trainers-storage does: exports into its bucket: task-2 is"
    assert waited in said
    assert "task-2, failed: FSx gives no reason. What it was to write into the bucket goes" in said
    assert "file system shardyard-trainers-storage absent" in said
