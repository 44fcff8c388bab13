"""Queues of AWS Batch: checks of what they are built on, their state, jobs and instances.

Subnet, default group and reservation are checked before anything is made: a wrong one makes an
environment that exists and never runs a job.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardyard.cluster.batch.stack import (
    SHARED,
    environment_name,
    environments,
    log_group,
    side_queue_name,
)
from shardyard.cluster.clients import Act, World
from shardyard.cluster.fsx import FileSystemOutputs
from shardyard.cluster.network import NetworkLocation, location_in_spec, network_stack_name
from shardyard.cluster.part import stack_outputs
from shardyard.cluster.spec import ClusterSpec
from shardyard.errors import CapacityError, RequestError, ShardyardError
from shardyard.io.polling import wait_for
from shardyard.launchers.aws_batch.checks import lets_in
from shardyard.launchers.node_rank import PORT
from shardyard.log import warn

# Queues of AWS Batch that stand: how they are, their jobs and instances; closed and sized.
#
# Asked of Batch and ECS themselves: a stack may be complete while its environment has gone INVALID.

GPU = "GPU"
"""Name of NVIDIA's devices in ECS, each by its id."""

ALIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
"""States of jobs that are not over."""

_SETTLE_EVERY_S = 2.0
_SETTLE_WITHIN_S = 300.0
"""For an update of a queue or an environment."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Common condition of environments and queues."""

    word: Literal["absent", "coming", "there", "going", "failed"]
    reason: str = ""
    tags: tuple[dict[str, str], ...] = ()
    """Tags of each environment and queue that exists."""


def queries_of(world: World) -> str:
    """Return the calls that ask AWS Batch, for the table."""
    asked = environments(world.spec)
    return (
        f"batch describe-compute-environments {' '.join(asked.values())}; "
        f"batch describe-job-queues {' '.join(asked)}"
    )


def environment_of(world: World, name: str) -> dict[str, Any] | None:
    """Ask Batch for a compute environment; None: there is none."""
    answer = world.ask("batch", "describe_compute_environments", computeEnvironments=[name])
    return _not_deleted((answer or {}).get("computeEnvironments", []))


def queue_of(world: World, name: str) -> dict[str, Any] | None:
    """Ask Batch for a queue; None: there is none."""
    answer = world.ask("batch", "describe_job_queues", jobQueues=[name])
    return _not_deleted((answer or {}).get("jobQueues", []))


def _not_deleted(items: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((one for one in items if one.get("status") != "DELETED"), None)


def condition_of(world: World) -> Condition:
    """Return the common condition; the worst of them decides the word."""
    named: dict[str, dict[str, Any] | None] = {}
    for queue, environment in environments(world.spec).items():
        named[f"compute environment {environment}"] = environment_of(world, environment)
        named[f"queue {queue}"] = queue_of(world, queue)
    there = {kind: one for kind, one in named.items() if one is not None}
    tags = tuple(one.get("tags") or {} for one in there.values())
    if not there:
        return Condition(word="absent")
    missing = [kind for kind in named if kind not in there]
    if missing and all(one.get("status") == "DELETING" for one in there.values()):
        return Condition(word="going", tags=tags)
    if missing:
        return Condition(word="failed", reason=f"missing: {missing[0]}", tags=tags)
    for kind, one in there.items():
        word, why = _condition(kind, one)
        if word != "there":
            return Condition(word=word, reason=why, tags=tags)
    return Condition(word="there", tags=tags)


def _condition(
    kind: str, one: dict[str, Any]
) -> tuple[Literal["coming", "there", "going", "failed"], str]:
    match one.get("status"):
        case "CREATING" | "UPDATING":
            return "coming", ""
        case "DELETING":
            return "going", ""
        case "VALID" if one.get("state") == "DISABLED":
            return "failed", f"the {kind} is DISABLED, and takes no jobs"
        case "VALID":
            return "there", ""
        case status:
            reason = one.get("statusReason") or "Batch gives no reason"
            return "failed", f"the {kind} is {status}: {reason}"


def jobs_of(world: World) -> list[str]:
    """Names of the jobs that wait or run.

    Raises:
        ShardyardError: Batch does not say it.
    """
    found = []
    for name in environments(world.spec):
        for status in ALIVE if queue_of(world, name) is not None else ():
            asked = world.listed(
                "batch", "list_jobs", "jobSummaryList", jobQueue=name, jobStatus=status
            )
            found += [str(job["jobName"]) for job in asked]
    return found


def close_acts(spec: ClusterSpec) -> list[Act]:
    """Return the calls that close queues and environments, so that Batch can delete them."""
    names = environments(spec)
    return [
        *(_queue_act(queue, "DISABLED") for queue in names),
        *(_disable_act(environment) for environment in names.values()),
    ]


def _queue_act(name: str, state: str) -> Act:
    params = {"jobQueue": name, "state": state}
    return Act(service="batch", call="update_job_queue", params=params)


def _disable_act(environment: str) -> Act:
    params = {"computeEnvironment": environment, "state": "DISABLED"}
    return Act(service="batch", call="update_compute_environment", params=params)


def close(world: World, in_use_by: Callable[[World], str]) -> None:
    """Let the queues take no job any more, and the environments start no instance.

    Batch deletes neither while it is enabled, and deletes a queue's jobs with it: those that came
    since they were looked for keep it.

    Args:
        in_use_by: Says which jobs there are; empty: none.

    Raises:
        RequestError: Jobs have come; the queues are open again.
        CapacityError: Batch does not end an update.
    """
    names = environments(world.spec)
    queues = [name for name in names if queue_of(world, name) is not None]
    for queue in queues:
        _set_queue(world, queue, "DISABLED")
    if queues and (held := in_use_by(world)):
        for queue in queues:
            _set_queue(world, queue, "ENABLED")
        raise RequestError(f"{world.spec.name} is not removed: {held}. Its queues are open again.")
    for environment in names.values():
        if environment_of(world, environment) is None:
            continue
        try:
            _disable_act(environment).do(world)
        except RequestError as error:  # an INVALID one may refuse; whether it goes, its stack says
            warn(f"{environment} is not disabled: {error}")
            continue
        _wait_until_updated(world, environment, environment_of)


def _set_queue(world: World, name: str, state: str) -> None:
    _queue_act(name, state).do(world)
    _wait_until_updated(world, name, queue_of)


def _wait_until_updated(
    world: World, name: str, describe: Callable[[World, str], dict[str, Any] | None]
) -> None:
    def is_updated() -> bool:
        return (describe(world, name) or {}).get("status") != "UPDATING"

    if not wait_for(is_updated, every_s=_SETTLE_EVERY_S, within_s=_SETTLE_WITHIN_S):
        raise CapacityError(
            f"{name} is still UPDATING after {_SETTLE_WITHIN_S / 60:.0f} minutes. Look at it in "
            "the console of AWS Batch, and run the same command again."
        )


def resize_act(spec: ClusterSpec, nodes: int) -> Act:
    """Return the call that keeps so many idle instances; jobs add more, up to nodes.max."""
    params = {
        "computeEnvironment": environment_name(spec),
        "computeResources": {"minvCpus": nodes * spec.instance.vcpus},
    }
    return Act(service="batch", call="update_compute_environment", params=params)


def instances_of(world: World) -> list[dict[str, Any]]:
    """Each instance with accelerators: its name, whether its agent is there, and its devices."""
    environment = environment_of(world, environment_name(world.spec))
    cluster = (environment or {}).get("ecsClusterArn")
    if not cluster:
        return []
    listed = world.ask("ecs", "list_container_instances", cluster=cluster, status="ACTIVE") or {}
    arns = listed.get("containerInstanceArns", [])
    if not arns:
        return []
    answer = world.ask(
        "ecs", "describe_container_instances", cluster=cluster, containerInstances=arns[:100]
    )
    return [
        {
            "name": one.get("ec2InstanceId", "an instance"),
            "ready": bool(one.get("agentConnected")),
            GPU: sum(
                len(resource.get("stringSetValue", ()))
                for resource in one.get("registeredResources", ())
                if resource["name"] == GPU
            ),
        }
        for one in (answer or {}).get("containerInstances", [])
    ]


def launch_settings(
    world: World, outputs: dict[str, str], fs: FileSystemOutputs | None
) -> dict[str, Any]:
    """Return the launch settings for this queue, as a part of a recipe.

    Args:
        outputs: Outputs of the environment's stack.
        fs: The file system, where there is one.
    """
    spec = world.spec
    roles = {"job_role": "JobRole", "execution_role": "ExecutionRole"}
    launch: dict[str, Any] = {
        "aws_batch": {
            "region": spec.region,
            "queue": spec.name,
            "side_queue": side_queue_name(spec),
            **{key: outputs[name] for key, name in roles.items() if name in outputs},
            "log_group": log_group(spec),
        }
    }
    if fs is not None:
        launch |= {"run_dir": f"{SHARED}/runs", "volumes": [_volume(fs)]}
    cluster = {"instance": spec.instance.name, "capacity": spec.nodes.capacity}
    if spec.capacity.kind == "block":
        cluster["block_ends"] = block_ends(world)
    return {"cluster": cluster, "launch": launch}


def _volume(fs: FileSystemOutputs) -> dict[str, str]:
    if fs.mount_name:
        return {"path": SHARED, "host": SHARED}
    return {"path": SHARED, "efs": fs.file_system, "access_point": fs.access_point}


def block_ends(world: World) -> str:
    """When the capacity block ends, as a recipe says it: it is the time limit of jobs.

    Raises:
        ShardyardError: AWS does not say it.
    """
    ends = reservation_of(world).get("EndDate")
    if ends is None:
        raise ShardyardError(
            f"{world.spec.nodes.capacity} has no end, so it is not a capacity block. Make the "
            f"queue with nodes.capacity=reservation:{world.spec.capacity.reservation}."
        )
    return f"{ends:%Y-%m-%dT%H:%M:%SZ}" if hasattr(ends, "strftime") else str(ends)


def reservation_of(world: World) -> dict[str, Any]:
    """Ask EC2 for the capacity reservation.

    Raises:
        RequestError: There is none of that id.
    """
    id, region = world.spec.capacity.reservation, world.spec.region
    answer = world.ask("ec2", "describe_capacity_reservations", CapacityReservationIds=[id]) or {}
    reservations: list[dict[str, Any]] = answer.get("CapacityReservations", [])
    if not reservations:
        raise RequestError(
            f"nodes.capacity={world.spec.nodes.capacity}: unknown reservation in {region}. `aws "
            f"ec2 describe-capacity-reservations --region {region}` lists yours."
        )
    return reservations[0]


_USABLE = frozenset({"active", "scheduled", "pending", "payment-pending"})
"""States of a reservation that may still give instances."""


def check_preflight(world: World) -> None:
    """Raise where jobs of this description could not run.

    Raises:
        RequestError: Subnet, default group or reservation do not fit.
        CapacityError: The subnet has too few addresses, or the reservation is over.
    """
    if world.spec.vpc.id is not None:  # a network of ours has room, and an open default group
        _check_subnet(world)
        if world.spec.has_efa and (world.spec.nodes.max or 1) > 1:
            _check_default_group(world)
    if world.spec.capacity.reservation is not None:
        _check_reservation(world)


def network_location(world: World) -> NetworkLocation:
    """The network that was named, or made.

    Raises:
        ShardyardError: The stack of the network is gone.
    """
    spec = world.spec
    if (named := location_in_spec(spec)) is not None:
        return named
    outputs = stack_outputs(world, network_stack_name(spec))
    return NetworkLocation(vpc=outputs["VPC"], subnet=outputs["SubnetsPrivate"])


def _check_subnet(world: World) -> None:
    spec = world.spec
    name = spec.vpc.subnets[spec.zone]
    answer = world.ask("ec2", "describe_subnets", SubnetIds=[name]) or {"Subnets": []}
    if not answer["Subnets"]:
        raise RequestError(
            f"vpc.subnets names {name}, which is not a subnet in {spec.region}. `aws ec2 "
            f"describe-subnets --region {spec.region}` lists yours."
        )
    subnet = answer["Subnets"][0]
    if (subnet["VpcId"], subnet["AvailabilityZone"]) != (spec.vpc.id, spec.zone):
        raise RequestError(
            f"vpc.subnets names {name}, which is in {subnet['AvailabilityZone']} of "
            f"{subnet['VpcId']}, not in {spec.zone} of {spec.vpc.id}. Name a subnet of these, or "
            "correct zone and vpc.id."
        )
    # Each interface of an instance has an address, and its container's one more.
    most, free = spec.nodes.max or 0, int(subnet["AvailableIpAddressCount"])
    wanted = most * (max(1, spec.instance.efa_count) + 1)
    if free < wanted:
        raise CapacityError(
            f"subnet {name} has {free} free addresses, and {most} x {spec.instance.name} need "
            f"{wanted}, one for each network interface and container. Take a larger subnet, or "
            "lower nodes.max."
        )


def default_group(world: World) -> dict[str, Any]:
    """The VPC's default security group, which containers get where the template has interfaces.

    Raises:
        RequestError: It has none, so it is no VPC of this region.
    """
    vpc = network_location(world).vpc
    wanted = {"vpc-id": vpc, "group-name": "default"}
    filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    answer = world.ask("ec2", "describe_security_groups", Filters=filters) or {}
    groups: list[dict[str, Any]] = answer.get("SecurityGroups", [])
    if not groups:
        raise RequestError(
            f"vpc.id={vpc} has no default security group in {world.spec.region}. "
            "Give the VPC that the subnet is in."
        )
    return groups[0]


def _check_default_group(world: World) -> None:
    """Source: AWS Batch User Guide, mnp-ce; github.com/aws/aws-cdk issue 21577."""
    group = default_group(world)
    name, region = group["GroupId"], world.spec.region
    if any(lets_in(rule, name) for rule in group.get("IpPermissions", ())):
        return
    raise RequestError(
        f"the default security group {name} of {world.spec.vpc.id} does not let itself in on port "
        f"{PORT}. Batch gives it to containers where instances have EFA, so nodes would not meet. "
        f"Let it: aws ec2 authorize-security-group-ingress --region {region} --group-id {name} "
        f"--protocol tcp --port 0-65535 --source-group {name}"
    )


def _check_reservation(world: World) -> None:
    spec, found = world.spec, reservation_of(world)
    wanted = {"InstanceType": spec.instance.name, "AvailabilityZone": spec.zone}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise RequestError(
                f"nodes.capacity={spec.nodes.capacity} is of {found.get(key)}, and this is "
                f"described with {value}. No instance would come out of it. Correct one of them."
            )
    if found.get("State") not in _USABLE:
        raise CapacityError(
            f"nodes.capacity={spec.nodes.capacity} is {found.get('State')}: it gives no instance "
            "any more. Name another."
        )
