"""What AWS has of a cluster after its removal, whoever made it: by tag, by name, by network.

eksctl and CloudFormation know what they made. What controllers in the cluster made, or what a
failed removal left, is found by asking each service.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardyard.cluster.batch import environment_name, log_group, stack_name
from shardyard.cluster.eksctl import NAME_TAG, OWNER_TAG
from shardyard.cluster.world import World
from shardyard.launchers.ledger import UUID

_ENDED = frozenset({"terminated", "deleted", "deleting", "shutting-down", "DELETE_COMPLETE"})


@dataclass(frozen=True, kw_only=True)
class Left:
    """One thing that is there."""

    kind: str
    id: str
    cost: str
    """In words: what it costs while it stands, or that it costs nothing."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of thing that a cluster may leave."""

    kind: str
    service: str
    call: str
    at: str
    """Where the list is in the answer."""
    id: str
    cost: str
    is_of: Callable[[Any, World], bool]
    state: Callable[[dict[str, Any]], str] = lambda _: ""


def _tags(item: dict[str, Any]) -> dict[str, str]:
    found = item.get("Tags") or item.get("TagSet") or item.get("tags") or []
    if isinstance(found, dict):
        return found
    return {tag["Key"]: tag["Value"] for tag in found}


def _is_tagged(item: dict[str, Any], world: World) -> bool:
    name, tags = world.given.name, _tags(item)
    return (
        tags.get(NAME_TAG) == name
        or tags.get("alpha.eksctl.io/cluster-name") == name
        or tags.get("eks:cluster-name") == name
        or f"kubernetes.io/cluster/{name}" in tags
    )


def _starts(key: str, *starts: str) -> Callable[[dict[str, Any], World], bool]:
    def is_of(item: dict[str, Any], world: World) -> bool:
        return str(item[key]).startswith(tuple(s.format(name=world.given.name) for s in starts))

    return is_of


def _group_name(item: dict[str, Any], world: World) -> bool:
    return _is_tagged(item, world) or str(item.get("GroupName", "")).startswith(
        f"eksctl-{world.given.name}-"
    )


def _in_network(item: dict[str, Any], world: World) -> bool:
    """Tagged, or in the network that was made for it: what controllers make may have no tag."""
    vpc = item.get("VpcId") or item.get("VPCId")
    return _is_tagged(item, world) or vpc in _vpcs(world)


def _own_network(item: dict[str, Any], world: World) -> bool:
    return world.given.vpc.id is None and _in_network(item, world)


def _own_group(item: dict[str, Any], world: World) -> bool:
    return item.get("GroupName") != "default" and (
        _in_network(item, world) or _group_name(item, world)
    )


def _is_cluster(item: str, world: World) -> bool:
    return world.given.kind == "eks" and item == world.given.name


def _is_log_group(item: dict[str, Any], world: World) -> bool:
    name, kind, group = world.given.name, world.given.kind, str(item["logGroupName"])
    if kind == "batch":
        return group == log_group(world.given)
    return group.startswith((f"/aws/eks/{name}/", f"/aws/containerinsights/{name}/"))


def _of_environment(name: str, world: World) -> bool:
    """Whether Batch made it for the environment: it draws an id behind the environment's name."""
    environment = re.escape(environment_name(world.given))
    made = rf"(AWSBatch-)?{environment}(_Batch_|-asg-|-){UUID}"
    return re.fullmatch(made, name.rpartition("/")[2]) is not None


def _ecs_cluster(item: str, world: World) -> bool:
    return _of_environment(item, world)


def _scaling_group(item: dict[str, Any], world: World) -> bool:
    return _is_tagged(item, world) or _of_environment(str(item["AutoScalingGroupName"]), world)


def _over(item: dict[str, Any]) -> str:
    return "deleted" if item.get("status") == "DELETED" else ""


def _role(item: dict[str, Any], world: World) -> bool:
    """Roles are of all regions: one of another cluster of the name has another owner's tag."""
    given = world.given
    if not str(item["RoleName"]).startswith((f"eksctl-{given.name}-", f"{stack_name(given)}-")):
        return False
    answer = world.ask("iam", "list_role_tags", RoleName=item["RoleName"]) or {}
    return _tags(answer).get(OWNER_TAG, world.owner) == world.owner


_NOTHING = "costs nothing, and stands in the way of the network"

KINDS = (
    _Kind(kind="EKS cluster", service="eks", call="list_clusters", at="clusters", id="",
          cost="$0.10 an hour", is_of=_is_cluster),
    _Kind(kind="CloudFormation stack", service="cloudformation", call="describe_stacks",
          at="Stacks", id="StackName", cost="what is in it",
          is_of=_starts("StackName", "eksctl-{name}-", "shardyard-{name}-"),
          state=lambda item: item["StackStatus"]),
    _Kind(kind="instance", service="ec2", call="describe_instances", at="Reservations.Instances",
          id="InstanceId", cost="its price an hour", is_of=_is_tagged,
          state=lambda item: item["State"]["Name"]),
    _Kind(kind="volume", service="ec2", call="describe_volumes", at="Volumes", id="VolumeId",
          cost="by its size", is_of=_is_tagged, state=lambda item: item["State"]),
    _Kind(kind="network interface", service="ec2", call="describe_network_interfaces",
          at="NetworkInterfaces", id="NetworkInterfaceId", cost=_NOTHING,
          is_of=_in_network),
    _Kind(kind="NAT gateway", service="ec2", call="describe_nat_gateways", at="NatGateways",
          id="NatGatewayId", cost="$0.045 an hour", is_of=_in_network,
          state=lambda item: item["State"]),
    _Kind(kind="elastic address", service="ec2", call="describe_addresses", at="Addresses",
          id="AllocationId", cost="$0.005 an hour", is_of=_is_tagged),
    _Kind(kind="security group", service="ec2", call="describe_security_groups",
          at="SecurityGroups", id="GroupId", cost=_NOTHING, is_of=_own_group),
    _Kind(kind="subnet", service="ec2", call="describe_subnets", at="Subnets", id="SubnetId",
          cost="costs nothing", is_of=_own_network),
    _Kind(kind="VPC", service="ec2", call="describe_vpcs", at="Vpcs", id="VpcId",
          cost="costs nothing", is_of=_own_network),
    _Kind(kind="launch template", service="ec2", call="describe_launch_templates",
          at="LaunchTemplates", id="LaunchTemplateName", cost="costs nothing",
          is_of=_starts("LaunchTemplateName", "eksctl-{name}-", "shardyard-{name}-batch")),
    _Kind(kind="placement group", service="ec2", call="describe_placement_groups",
          at="PlacementGroups", id="GroupName", cost="costs nothing", is_of=_group_name),
    _Kind(kind="Auto Scaling group", service="autoscaling", call="describe_auto_scaling_groups",
          at="AutoScalingGroups", id="AutoScalingGroupName", cost="starts instances",
          is_of=_scaling_group),
    _Kind(kind="compute environment", service="batch", call="describe_compute_environments",
          at="computeEnvironments", id="computeEnvironmentName", cost="starts instances",
          is_of=_is_tagged, state=_over),
    _Kind(kind="job queue", service="batch", call="describe_job_queues", at="jobQueues",
          id="jobQueueName", cost="costs nothing by itself", is_of=_is_tagged, state=_over),
    _Kind(kind="ECS cluster", service="ecs", call="list_clusters", at="clusterArns", id="",
          cost="costs nothing by itself", is_of=_ecs_cluster),
    _Kind(kind="load balancer", service="elb", call="describe_load_balancers",
          at="LoadBalancerDescriptions", id="LoadBalancerName", cost="its price an hour",
          is_of=_in_network),
    _Kind(kind="load balancer", service="elbv2", call="describe_load_balancers",
          at="LoadBalancers", id="LoadBalancerArn", cost="its price an hour",
          is_of=_in_network),
    _Kind(kind="file system", service="fsx", call="describe_file_systems", at="FileSystems",
          id="FileSystemId", cost="by its size", is_of=_is_tagged,
          state=lambda item: str(item.get("Lifecycle") or "")),
    _Kind(kind="file system", service="efs", call="describe_file_systems", at="FileSystems",
          id="FileSystemId", cost="by what is stored", is_of=_is_tagged,
          state=lambda item: str(item.get("LifeCycleState") or "")),
    _Kind(kind="log group", service="logs", call="describe_log_groups", at="logGroups",
          id="logGroupName", cost="by what is stored",
          is_of=_is_log_group),
    _Kind(kind="IAM role", service="iam", call="list_roles", at="Roles", id="RoleName",
          cost="costs nothing", is_of=_role),
)  # fmt: skip
"""Every kind that is looked for; each is asked for whole, page by page."""


def left_of(world: World) -> list[Left]:
    """Everything of a cluster that AWS still has.

    Raises:
        AccessError: These credentials may not look; then it is not known what is left.
        CapacityError: AWS cannot be reached.
    """
    found = [left for kind in KINDS for left in _left(kind, world)]
    found += _tagged(world)
    return list({(left.kind, left.id): left for left in found}.values())


def _left(kind: _Kind, world: World) -> Iterator[Left]:
    for item in _all(kind, world):
        if not kind.is_of(item, world) or (kind.id and kind.state(item) in _ENDED):
            continue
        yield Left(kind=kind.kind, id=str(item[kind.id] if kind.id else item), cost=kind.cost)


def _all(kind: _Kind, world: World) -> Iterator[Any]:
    client = world.client(kind.service)
    if not client.can_paginate(kind.call):
        yield from _at(
            world.ask(
                kind.service,
                kind.call,
            )
            or {},
            kind.at,
        )
        return
    from shardyard.aws import aws_errors

    with aws_errors(f"ask {kind.service} ({kind.call})", world.given.region):
        for page in client.get_paginator(kind.call).paginate():
            yield from _at(page, kind.at)


def _at(answer: dict[str, Any], path: str) -> Iterator[Any]:
    first, _, rest = path.partition(".")
    for item in answer.get(first, []):
        if rest:
            yield from _at(item, rest)
        else:
            yield item


def _vpcs(world: World) -> set[str]:
    """The network that was made for it; one that was there before has others' things in it."""
    if world.given.vpc.id is not None:
        return set()
    return {
        entry.details["vpc"]
        for entry in world.ledger.all()
        if re.fullmatch(r"vpc-[0-9a-f]{8,17}", entry.details.get("vpc", ""))
    }


def _tagged(world: World) -> Iterator[Left]:
    """What the tagging service knows, of whatever kind."""
    params = {"TagFilters": [{"Key": NAME_TAG, "Values": [world.given.name]}]}
    listed = world.ask("resourcegroupstaggingapi", "get_resources", **params) or {}
    for item in listed.get("ResourceTagMappingList", []):
        arn = str(item["ResourceARN"])
        yield Left(kind="tagged", id=arn, cost="look at it by its ARN")
