"""Whether what exists is fit for a queue of AWS Batch: subnet, default group, reservation.

Asked before anything is made: each of these makes an environment that stands and never runs a job.
"""

from typing import Any

from shardyard.cluster.batch.batch_queue import reservation_of
from shardyard.cluster.network import Place, network_stack_name, place_named
from shardyard.cluster.resources import stack_outputs
from shardyard.cluster.world import World
from shardyard.errors import CapacityError, RequestError
from shardyard.launchers.aws_batch.checks import lets_in
from shardyard.launchers.node_rank import PORT

_USABLE = frozenset({"active", "scheduled", "pending", "payment-pending"})
"""States of a reservation that may still give instances."""


def check_place(world: World) -> None:
    """Raise where jobs of this description could not run.

    Raises:
        RequestError: Subnet, default group or reservation do not fit.
        CapacityError: The subnet has too few addresses, or the reservation is over.
    """
    if world.given.vpc.id is not None:  # a network of ours has room, and an open default group
        _check_subnet(world)
        if world.given.has_efa and (world.given.nodes.max or 1) > 1:
            _check_default_group(world)
    if world.given.capacity.reservation is not None:
        _check_reservation(world)


def place_of(world: World) -> Place:
    """The network that was named, or made.

    Raises:
        ShardyardError: The stack of the network is gone.
    """
    given = world.given
    if (named := place_named(given)) is not None:
        return named
    outputs = stack_outputs(world, network_stack_name(given))
    return Place(vpc=outputs["VPC"], subnet=outputs["SubnetsPrivate"])


def _check_subnet(world: World) -> None:
    given = world.given
    name = given.vpc.subnets[given.zone]
    answer = world.ask("ec2", "describe_subnets", SubnetIds=[name]) or {"Subnets": []}
    if not answer["Subnets"]:
        raise RequestError(
            f"vpc.subnets names {name}, and there is no such subnet in {given.region}. `aws ec2 "
            f"describe-subnets --region {given.region}` lists yours."
        )
    subnet = answer["Subnets"][0]
    if (subnet["VpcId"], subnet["AvailabilityZone"]) != (given.vpc.id, given.zone):
        raise RequestError(
            f"vpc.subnets names {name}, which is in {subnet['AvailabilityZone']} of "
            f"{subnet['VpcId']}, not in {given.zone} of {given.vpc.id}. Name a subnet of these, or "
            "correct zone and vpc.id."
        )
    # Each interface of an instance has an address, and its container's one more.
    most, free = given.nodes.max or 0, int(subnet["AvailableIpAddressCount"])
    wanted = most * (max(1, given.instance.efa_count) + 1)
    if free < wanted:
        raise CapacityError(
            f"subnet {name} has {free} free addresses, and {most} x {given.instance.name} need "
            f"{wanted}, one for each network interface and container. Take a larger subnet, or "
            "lower nodes.max."
        )


def default_group(world: World) -> dict[str, Any]:
    """The VPC's default security group, which containers get where the template has interfaces.

    Raises:
        RequestError: It has none, so it is no VPC of this region.
    """
    vpc = place_of(world).vpc
    wanted = {"vpc-id": vpc, "group-name": "default"}
    filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    answer = world.ask("ec2", "describe_security_groups", Filters=filters) or {}
    found: list[dict[str, Any]] = answer.get("SecurityGroups", [])
    if not found:
        raise RequestError(
            f"vpc.id={vpc} has no default security group in {world.given.region}. "
            "Give the VPC that the subnet is in."
        )
    return found[0]


def _check_default_group(world: World) -> None:
    """Source: AWS Batch User Guide, mnp-ce; github.com/aws/aws-cdk issue 21577."""
    group = default_group(world)
    name, region = group["GroupId"], world.given.region
    if any(lets_in(rule, name) for rule in group.get("IpPermissions", ())):
        return
    raise RequestError(
        f"the default security group {name} of {world.given.vpc.id} does not let itself in on port "
        f"{PORT}. Batch gives it to containers where instances have EFA, so nodes would not meet. "
        f"Let it: aws ec2 authorize-security-group-ingress --region {region} --group-id {name} "
        f"--protocol tcp --port 0-65535 --source-group {name}"
    )


def _check_reservation(world: World) -> None:
    given, found = world.given, reservation_of(world)
    wanted = {"InstanceType": given.instance.name, "AvailabilityZone": given.zone}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise RequestError(
                f"nodes.capacity={given.nodes.capacity} is of {found.get(key)}, and this is "
                f"described with {value}. No instance would come out of it. Correct one of them."
            )
    if found.get("State") not in _USABLE:
        raise CapacityError(
            f"nodes.capacity={given.nodes.capacity} is {found.get('State')}: it gives no instance "
            "any more. Name another."
        )
