"""A queue of AWS Batch made and removed: killed anywhere, lied to, under jobs, beside others'."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardyard.cluster.batch.queue import ALIVE
from shardyard.cluster.clients import World, new_world, world_named
from shardyard.cluster.create import make, node_report, scale, write_settings
from shardyard.cluster.delete import Removed, remove
from shardyard.cluster.part_order import parts_of
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from tests.cluster.batch_stand_in import Account, StandInWorld, in_account
from tests.cluster.clients import client_of, playing_aws
from tests.cluster.stand_in import Killed

pytestmark = pytest.mark.heavy

FAST = {"poll_s": 0.0, "limit_s": 0.05}
OPEN = {"trainers": "ENABLED", "trainers-side": "ENABLED"}
MADE = ["shardyard-trainers-batch", "shardyard-trainers-storage"]
RESERVATION = "cr-0123456789abcdef0"


@pytest.fixture(autouse=True)
def aws() -> Iterator[None]:
    with playing_aws():
        open_default_group()
        yield


def open_default_group() -> None:
    """As a VPC's default group is at first; moto's is not."""
    ec2 = client_of("ec2")
    wanted = [{"Name": "group-name", "Values": ["default"]}]
    (group,) = ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]
    pair = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[pair])


@pytest.fixture
def account() -> Account:
    return Account()


def described(*more: str) -> list[str]:
    """Settings that name the default network of moto's account."""
    ec2 = client_of("ec2")
    only = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    (subnet,) = ec2.describe_subnets(Filters=only)["Subnets"]
    place = f"{{id: {subnet['VpcId']}, subnets: {{us-east-1a: {subnet['SubnetId']}}}}}"
    return [
        "kind=batch", "name=trainers", "region=us-east-1", "zone=us-east-1a", f"vpc={place}",
        "nodes.instance=p4d.24xlarge", "nodes.max=4", "storage.kind=efs", *more,
    ]  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, account: Account) -> StandInWorld:
    return in_account(new_world(read_cluster_spec(described()), tmp_path), account)


def another(folder: Path, account: Account, *more: str) -> StandInWorld:
    return in_account(new_world(read_cluster_spec(described(*more)), folder), account)


def yes(_question: str) -> None:
    return None


def gone(world: World) -> Removed:
    return remove(world, agree=yes, agree_to_lose=yes, **FAST)


def stacks() -> list[str]:
    listed = client_of("cloudformation").describe_stacks()["Stacks"]
    return sorted(stack["StackName"] for stack in listed)


def queues() -> dict[str, str]:
    listed = client_of("batch").describe_job_queues()["jobQueues"]
    return {queue["jobQueueName"]: queue["state"] for queue in listed}


def test_the_queue_is_made_behind_the_file_system_and_both_are_seen_to_be_gone(
    world: StandInWorld, account: Account
) -> None:
    make(world, **FAST)
    assert stacks() == MADE
    assert queues() == OPEN
    names = [params["StackName"] for params in account.calls("create_stack")]
    assert names == ["shardyard-trainers-storage", "shardyard-trainers-batch"]
    removed = gone(world)
    assert removed.is_clean, removed
    assert (stacks(), queues()) == ([], {})
    asked = " ".join(seen.asked for seen in removed.seen)
    assert "batch describe-job-queues trainers" in asked
    assert "batch describe-compute-environments shardyard-trainers" in asked


def test_without_a_network_one_is_made_first_and_removed_last(
    tmp_path: Path, account: Account
) -> None:
    settings = [word for word in described() if not word.startswith("vpc=")]
    world = in_account(new_world(read_cluster_spec(settings), tmp_path), account)
    before = {vpc["VpcId"] for vpc in client_of("ec2").describe_vpcs()["Vpcs"]}
    make(world, **FAST)
    assert stacks() == sorted([*MADE, "shardyard-trainers-network"])
    names = [params["StackName"].rpartition("-")[2] for params in account.calls("create_stack")]
    assert names == ["network", "storage", "batch"]
    ec2, batch = client_of("ec2"), client_of("batch")
    (vpc,) = {vpc["VpcId"] for vpc in ec2.describe_vpcs()["Vpcs"]} - before
    for one in batch.describe_compute_environments()["computeEnvironments"]:
        (subnet,) = ec2.describe_subnets(SubnetIds=one["computeResources"]["subnets"])["Subnets"]
        assert (subnet["VpcId"], subnet["AvailabilityZone"]) == (vpc, "us-east-1a")
    removed = gone(world)
    assert removed.is_clean, removed
    assert stacks() == []
    assert {vpc["VpcId"] for vpc in ec2.describe_vpcs()["Vpcs"]} == before


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.system)])
def test_a_making_killed_behind_any_step_goes_on_to_the_same_end(
    tmp_path: Path, account: Account, world: StandInWorld, step: int
) -> None:
    account.dies_after = step
    with suppress(Killed):
        make(world, **FAST)
    account.dies_after = None
    again = in_account(world_named("trainers", tmp_path), account)
    make(again, **FAST)
    assert stacks() == MADE
    assert len(account.calls("create_stack")) == 2, "nothing is made twice"
    assert gone(again).is_clean


@pytest.mark.parametrize(
    "step", [1, *(pytest.param(step, marks=pytest.mark.system) for step in range(2, 5))]
)
def test_a_removal_killed_behind_any_step_goes_on_to_the_same_end(
    tmp_path: Path, account: Account, world: StandInWorld, step: int
) -> None:
    make(world, **FAST)
    account.dies_after = len(account.ran) + step
    with suppress(Killed):
        gone(world)
    assert len(account.ran) == account.dies_after, "it was killed"
    account.dies_after = None
    assert gone(in_account(world_named("trainers", tmp_path), account)).is_clean
    assert (stacks(), queues()) == ([], {})


def test_an_environment_that_is_invalid_is_named_with_batchs_reason(
    world: StandInWorld, account: Account
) -> None:
    account.invalid = "CLIENT_ERROR - not authorized"
    with pytest.raises(
        ShardyardError,
        match=r"environment shardyard-trainers is INVALID: CLIENT_ERROR - not authorized",
    ):
        make(world, **FAST)
    (environment,) = (part for part in parts_of(world.spec) if part.kind == "batch environment")
    assert environment.state(world).word == "failed"


def _invalid(account: Account) -> None:
    account.invalid = "CLIENT_ERROR"
    account.lies.add("DELETE_FAILED")


LIES: dict[str, Callable[[Account], None]] = {
    "is INVALID: CLIENT_ERROR": _invalid,
    "without its stack": lambda account: account.lies.add("queue stays"),
    "DELETE_FAILED": lambda account: account.lies.add("DELETE_FAILED"),
}


@pytest.mark.system
@pytest.mark.parametrize("named", LIES)
def test_what_does_not_go_is_named_and_what_it_stands_on_stays(
    world: StandInWorld, account: Account, named: str
) -> None:
    make(world, **FAST)
    LIES[named](account)
    removed = gone(world)
    assert not removed.is_clean
    assert any(named in problem for problem in removed.problems), removed.problems
    assert "shardyard-trainers-storage" in stacks(), "what it stands on is not touched"
    kinds = {left.kind for left in removed.left}
    assert kinds & {"job queue", "compute environment", "CloudFormation stack"}
    account.lies.clear()
    account.invalid = ""


def test_a_removal_that_failed_goes_on_once_it_can(world: StandInWorld, account: Account) -> None:
    make(world, **FAST)
    account.lies.add("DELETE_FAILED")
    assert not gone(world).is_clean
    account.lies.clear()
    assert gone(world).is_clean
    assert (stacks(), queues()) == ([], {})


def test_nothing_is_removed_while_jobs_are_in_the_queue(
    world: StandInWorld, account: Account
) -> None:
    make(world, **FAST)
    for state in ALIVE:
        account.jobs = [(state, "shardyard-bert")]
        with pytest.raises(
            RequestError, match=r"1 jobs are in its queues .shardyard-bert.*All of it was kept"
        ):
            gone(world)
    assert (stacks(), queues()) == (MADE, OPEN)


def test_a_job_that_comes_while_the_queue_is_closed_keeps_it(
    world: StandInWorld, account: Account
) -> None:
    make(world, **FAST)
    account.come_when_closed.append(("RUNNABLE", "shardyard-late"))
    removed = gone(world)
    assert any("shardyard-late" in problem for problem in removed.problems)
    assert (stacks(), queues()) == (MADE, OPEN)


def test_a_queue_of_the_name_that_somebody_else_made_is_never_touched(
    tmp_path: Path, account: Account, world: StandInWorld
) -> None:
    make(world, **FAST)
    other = another(tmp_path / "other", account)
    with pytest.raises(AccessError, match=r"was not made from .*It was not changed"):
        make(other, **FAST)
    with pytest.raises(AccessError, match="It was not changed"):
        gone(other)
    assert (stacks(), queues()) == (MADE, OPEN)


def test_a_queue_of_the_name_without_our_tags_is_never_touched(
    world: StandInWorld,
) -> None:
    make(world, **FAST)
    arn = client_of("batch").describe_job_queues()["jobQueues"][0]
    client_of("batch").untag_resource(
        resourceArn=arn["jobQueueArn"], tagKeys=["shardyard-cluster-id"]
    )
    with pytest.raises(AccessError, match="shardyard-cluster-id is missing"):
        gone(world)
    assert queues() == OPEN


def test_an_eks_cluster_of_the_name_is_neither_asked_nor_named(world: StandInWorld) -> None:
    make(world, **FAST)
    client_of("eks").create_cluster(
        name="trainers", roleArn="arn:aws:iam::123456789012:role/eks", resourcesVpcConfig={}
    )
    assert gone(world).is_clean


def _ecs(account: Account, world: StandInWorld) -> None:
    make(world, **FAST)
    name = "AWSBatch-shardyard-trainers-01234567-89ab-cdef-0123-456789abcdef"
    account.client("ecs").create_cluster(clusterName=name)
    account.client("ecs").create_cluster(clusterName=name.replace("trainers", "trainers-two"))


def _log_group(account: Account, world: StandInWorld) -> None:
    make(world, **FAST)
    account.client("logs").create_log_group(logGroupName="/shardyard/trainers-two")
    gone(world)
    account.client("logs").create_log_group(logGroupName="/shardyard/trainers")


def _role(account: Account, world: StandInWorld) -> None:
    make(world, **FAST)
    account.client("iam").create_role(
        RoleName="shardyard-trainers-batch-JobRole-1", AssumeRolePolicyDocument="{}"
    )


LEFT = {"ECS cluster": _ecs, "log group": _log_group, "IAM role": _role}


@pytest.mark.system
@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_is_found_and_named(world: StandInWorld, account: Account, kind: str) -> None:
    LEFT[kind](account, world)
    removed = gone(world)
    assert not removed.is_clean
    assert [left.kind for left in removed.left if left.kind != "tagged"] == [kind], removed.left


def test_scaling_keeps_instances_without_a_job_and_refuses_more_than_jobs_may_have(
    world: StandInWorld, account: Account
) -> None:
    make(world, **FAST)
    scale(world, 2, agree=yes, **FAST)
    assert account.calls("update_compute_environment") == [
        {"computeEnvironment": "shardyard-trainers", "computeResources": {"minvCpus": 192}}
    ]
    assert node_report(world) == "i-0 ready, 8 of 8 GPU; i-1 ready, 8 of 8 GPU"
    with pytest.raises(RequestError, match=r"takes 0 to 4 accelerator nodes .*not 5"):
        scale(world, 5, agree=yes, **FAST)


def test_instances_that_lack_devices_are_not_ready(world: StandInWorld, account: Account) -> None:
    make(world, **FAST)
    account.devices = 0
    with pytest.raises(CapacityError, match=r"0 of 8 GPU.*the drivers of the instances' image"):
        scale(world, 1, agree=yes, **FAST)


RESERVED = {"InstanceType": "p4d.24xlarge", "AvailabilityZone": "us-east-1a", "State": "active"}


@pytest.mark.parametrize(
    ("reservation", "told"),
    [
        ({}, "unknown reservation in us-east-1"),
        ({**RESERVED, "InstanceType": "p5.48xlarge"}, "is of p5.48xlarge, and this is described"),
        ({**RESERVED, "AvailabilityZone": "us-east-1b"}, "is of us-east-1b, and this is"),
        ({**RESERVED, "State": "expired"}, "is expired: it gives no instance"),
    ],
)
def test_a_reservation_that_gives_no_instance_is_refused_before_anything_is_made(
    tmp_path: Path, account: Account, reservation: dict[str, str], told: str
) -> None:
    account.reservations = [reservation] if reservation else []
    reserved = another(tmp_path, account, f"nodes.capacity=reservation:{RESERVATION}")
    with pytest.raises(ShardyardError, match=told):
        make(reserved, **FAST)
    assert (stacks(), account.ran) == ([], [])


def test_a_subnet_with_too_few_addresses_is_refused(tmp_path: Path, account: Account) -> None:
    large = another(tmp_path, account, "nodes={instance: p5.48xlarge, max: 64}")
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    small = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.0.0/24", AvailabilityZone="us-east-1a")
    place = {"id": vpc, "subnets": {"us-east-1a": small["Subnet"]["SubnetId"]}}
    given = large.spec.model_copy(update={"vpc": large.spec.vpc.model_copy(update=place)})
    with pytest.raises(CapacityError, match=r"251 free addresses, and 64 x p5.48xlarge need 2112"):
        make(in_account(World(folder=tmp_path, spec=given, owner=large.owner), account), **FAST)
    assert stacks() == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("vpc.id=vpc-0123456789abcdef0", r"us-east-1a of vpc-.*, not in us-east-1a of vpc-0123456"),
        (
            "vpc.subnets={us-east-1a: subnet-0123456789abcdef0}",
            "which is not a subnet in us-east-1",
        ),
    ],
)
def test_a_network_that_is_another_is_refused(
    tmp_path: Path, account: Account, more: str, told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        make(another(tmp_path, account, more), **FAST)


def test_a_default_group_in_which_nodes_would_not_meet_is_refused(
    world: StandInWorld, account: Account
) -> None:
    ec2 = account.client("ec2")
    only = [{"Name": "vpc-id", "Values": [world.spec.vpc.id]},
            {"Name": "group-name", "Values": ["default"]}]  # fmt: skip
    (group,) = ec2.describe_security_groups(Filters=only)["SecurityGroups"]
    ec2.revoke_security_group_ingress(
        GroupId=group["GroupId"], IpPermissions=group["IpPermissions"]
    )
    with pytest.raises(RequestError, match=r"does not let itself in .*authorize-security-group"):
        make(world, **FAST)
    assert stacks() == []


def test_what_a_recipe_needs_is_written_and_taken(world: StandInWorld) -> None:
    make(world, **FAST)
    path = write_settings(world)
    recipe = load_recipe([path], ["model.preset=llama-tiny"])
    check(recipe)
    aws_batch, (volume,) = recipe.launch.aws_batch, recipe.launch.volumes
    assert (aws_batch.queue, aws_batch.log_group) == ("trainers", "/shardyard/trainers")
    assert str(aws_batch.execution_role).startswith("arn:aws:iam::123456789012:role/")
    assert aws_batch.job_role is None, "containers need none"
    assert recipe.launch.run_dir == f"{volume.path}/runs"
    assert str(volume.access_point).startswith("fsap-")
    assert recipe.cluster.instance == "p4d.24xlarge"


def test_the_end_of_a_capacity_block_is_told_to_the_recipe(
    tmp_path: Path, account: Account
) -> None:
    ends = datetime(2027, 1, 31, 11, 30, tzinfo=UTC)
    account.reservations = [{**RESERVED, "EndDate": ends}]
    block = another(tmp_path, account, f"nodes.capacity=block:{RESERVATION}", "storage.kind=none")
    make(block, **FAST)
    recipe = load_recipe([write_settings(block)])
    assert recipe.cluster.capacity == f"block:{RESERVATION}"
    assert recipe.cluster.block_ends == "2027-01-31T11:30:00Z"
    account.reservations = [RESERVED]
    with pytest.raises(ShardyardError, match="has no end, so it is not a capacity block"):
        write_settings(block)
