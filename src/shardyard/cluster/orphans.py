"""Resources that a cluster may leave in AWS, and the sweep that finds them.

Each kind has its list, its mark of ours, and its price. A resource is the cluster's by its tags,
by its name, or by the network that was made for it. One with another id of the same name is
reported, too, as it costs all the same.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardyard.cluster.batch.stack import environments, log_group, stack_name
from shardyard.cluster.clients import World
from shardyard.cluster.eksctl import NAME_TAG, OWNER_TAG
from shardyard.cluster.prices import CONTROL_PLANE_USD_PER_HOUR, NAT_USD_PER_HOUR, fsx_usd_per_month
from shardyard.cluster.spec import SYSTEM_USD_PER_HOUR, AdoptedCluster, ClusterSpec
from shardyard.errors import RequestError, ShardyardError
from shardyard.hardware.catalogue import instance
from shardyard.launchers.ledger import UUID
from shardyard.log import info

OVER = frozenset({"terminated", "deleted", "DELETED", "DELETE_COMPLETE", "INACTIVE"})
"""States in which a service still tells of what is gone. What is being deleted is not over: it may
stay so for ever."""

NAME_TAGS = (
    NAME_TAG, "alpha.eksctl.io/cluster-name", "eks:cluster-name", "aws:eks:cluster-name",
    "cluster.k8s.amazonaws.com/name", "elbv2.k8s.aws/cluster", "KubernetesCluster",
)  # fmt: skip
"""Tags whose value is the cluster's name: ours, eksctl's, EKS's, and those of controllers in it."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """Traces by which the cluster's resources are known."""

    spec: ClusterSpec
    owner: str
    vpcs: frozenset[str] = frozenset()
    """Networks that were made for it; one that was there before has others' things in it."""
    subnets: frozenset[str] = frozenset()
    """Subnets of those networks."""
    groups: frozenset[str] = frozenset()
    """Security groups that are its: what has one of them is its, too."""


@dataclass(frozen=True, kw_only=True)
class ResourceType:
    """One kind of thing."""

    name: str
    service: str
    call: str
    at: str
    """Path of the list in the answer."""
    id: str
    """Key of its id; empty: the item is the id."""
    is_of: Callable[[Any, Traces], bool]
    """Whether one is the cluster's."""
    cost: Callable[[Any], str]
    """Cost of one, in words."""
    state: Callable[[Any], str] = lambda _: ""
    params: Mapping[str, Any] = field(default_factory=dict)
    arn: str = ""
    """Pattern of ``service:resource`` of its ARN, with the id in a group; empty: it has none."""
    tags_call: str = ""
    """Call that tells its tags, and key of its id there, where the list does not."""
    tags_decide: bool = False
    """Whether only its tags say whose it is."""


def tags_of(item: Any) -> dict[str, str]:
    """The tags of an item, in whichever of AWS's ways."""
    if not isinstance(item, dict):
        return {}
    found = item.get("Tags") or item.get("TagSet") or item.get("tags") or {}
    if isinstance(found, dict):
        return dict(found)
    return {tag["Key"]: tag["Value"] for tag in found}


def is_tagged(tags: Mapping[str, str], traces: Traces) -> bool:
    """Whether tags name the cluster."""
    name = traces.spec.name
    named = any(tags.get(key) == name for key in NAME_TAGS)
    return named or f"kubernetes.io/cluster/{name}" in tags


def is_of_another(tags: Mapping[str, str], traces: Traces) -> bool:
    """Whether tags say that another making of the name brought it."""
    return tags.get(OWNER_TAG, traces.owner) != traces.owner


def is_of_other_name(tags: Mapping[str, str], traces: Traces) -> bool:
    """Check whether tags name another cluster; resource names do not distinguish a-b from a."""
    return any(tags.get(key, traces.spec.name) != traces.spec.name for key in NAME_TAGS)


def _by_tag(item: Any, traces: Traces) -> bool:
    return is_tagged(tags_of(item), traces)


def _by_name(key: str, *starts: str) -> Callable[[Any, Traces], bool]:
    def is_of(item: Any, traces: Traces) -> bool:
        name = str(item.get(key, ""))
        found = name.startswith(tuple(start.format(name=traces.spec.name) for start in starts))
        found = found and not is_of_other_name(tags_of(item), traces)
        return found or _by_tag(item, traces)

    return is_of


def _in_network(item: Any, traces: Traces) -> bool:
    """Tagged, in the network that was made for it, or with a security group of its own."""
    vpcs = {item.get("VpcId"), item.get("VPCId")}
    vpcs |= {one.get("VpcId") for one in item.get("Attachments", []) if isinstance(one, dict)}
    groups = {group.get("GroupId") for group in item.get("Groups", [])}
    groups |= set(item.get("SecurityGroups") or ())
    found = vpcs & traces.vpcs or _subnets(item) & traces.subnets or groups & traces.groups
    return bool(found) or _by_tag(item, traces)


def _subnets(item: Mapping[str, Any]) -> set[str]:
    found = {str(item.get("SubnetId", "")), *item.get("SubnetIds", ()), *item.get("Subnets", ())}
    found |= set(str(item.get("VPCZoneIdentifier", "")).split(","))
    found |= {str(zone.get("SubnetId", "")) for zone in _zones(item)}
    found |= set(item.get("computeResources", {}).get("subnets", ()))
    return found - {""}


def _zones(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [zone for zone in item.get("AvailabilityZones", ()) if isinstance(zone, dict)]


def is_group(item: Any, traces: Traces) -> bool:
    """Whether a security group is the cluster's: EKS's, eksctl's, ours, or of its network."""
    name = traces.spec.name
    if item.get("GroupName") == "default":
        return False
    starts = (f"eksctl-{name}-", f"eks-cluster-sg-{name}-", f"{stack_name(traces.spec)}-Group-",
              f"shardyard-{name}-storage-Group-")  # fmt: skip
    named = str(item.get("GroupName", "")).startswith(starts)
    named = named and not is_of_other_name(tags_of(item), traces)
    return named or _in_network(item, traces)


def _is_cluster(item: Any, traces: Traces) -> bool:
    return traces.spec.kind == "eks" and item == traces.spec.name


def _is_log_group(item: Any, traces: Traces) -> bool:
    name, group = traces.spec.name, str(item["logGroupName"])
    if traces.spec.kind == "batch":
        return group == log_group(traces.spec)
    return group.startswith((f"/aws/eks/{name}/", f"/aws/containerinsights/{name}/"))


def _of_environment(name: str, traces: Traces) -> bool:
    """Whether Batch made it for an environment: it draws an id behind the environment's name."""
    environment = "|".join(re.escape(one) for one in environments(traces.spec).values())
    made = rf"(AWSBatch-)?({environment})(_Batch_|-asg-|-){UUID}"
    return re.fullmatch(made, name.rpartition("/")[2]) is not None


def _ecs_cluster(item: Any, traces: Traces) -> bool:
    return _of_environment(str(item), traces)


def _scaling_group(item: Any, traces: Traces) -> bool:
    return _in_network(item, traces) or _of_environment(str(item["AutoScalingGroupName"]), traces)


def _role(item: Any, traces: Traces) -> bool:
    starts = (f"eksctl-{traces.spec.name}-", f"{stack_name(traces.spec)}-")
    return str(item["RoleName"]).startswith(starts)


def _oidc_provider(item: Any, traces: Traces) -> bool:
    return f"/oidc.eks.{traces.spec.region}." in str(item["Arn"])


def _constant_text(words: str) -> Callable[[Any], str]:
    return lambda _: words


def _instance_cost(item: Any) -> str:
    name = str(item.get("InstanceType"))
    usd = SYSTEM_USD_PER_HOUR.get(name)
    try:
        usd = instance(name).usd_per_hour if usd is None else usd
    except RequestError:
        usd = None  # of a type that is in no table
    return f"{name}, its price" if usd is None else f"{name}, ${usd:,.2f} an hour on demand"


def _fsx_cost(item: Any) -> str:
    size = int(item.get("StorageCapacity") or 0)
    lustre = item.get("LustreConfiguration") or {}
    speed = int(lustre.get("PerUnitStorageThroughput") or 0)
    usd = fsx_usd_per_month(size, speed)
    return f"{size} GiB, " + ("by its size" if usd is None else f"${usd:,.2f} a month")


def _efs_cost(item: Any) -> str:
    stored = int((item.get("SizeInBytes") or {}).get("Value") or 0)
    return f"{stored / 2**30:,.1f} GiB are stored, and cost by the month"


def _is_nothing_but(words: str) -> Callable[[Any], str]:
    return _constant_text(f"costs no money{words}")


_BARS = _is_nothing_but(", and blocks the removal of the network")
_FREE = _is_nothing_but("")

KINDS = (
    ResourceType(name="EKS cluster", service="eks", call="list_clusters", at="clusters", id="",
         is_of=_is_cluster, cost=_constant_text(f"${CONTROL_PLANE_USD_PER_HOUR:.2f} an hour"),
         arn=r"eks:[^/]+/([^/]+).*"),
    ResourceType(name="CloudFormation stack", service="cloudformation", call="describe_stacks",
         at="Stacks", id="StackName", is_of=_by_name("StackName", "eksctl-{name}-",
         "shardyard-{name}-network", "shardyard-{name}-storage", "shardyard-{name}-batch"),
         cost=_constant_text("what is in it"),
         state=lambda item: str(item["StackStatus"]), arn=r"cloudformation:stack/([^/]+)/.*"),
    ResourceType(name="instance", service="ec2", call="describe_instances",
         at="Reservations.Instances",
         id="InstanceId", is_of=_in_network, cost=_instance_cost,
         state=lambda item: str(item["State"]["Name"]), arn=r"ec2:instance/(.+)"),
    ResourceType(name="volume", service="ec2", call="describe_volumes", at="Volumes", id="VolumeId",
         is_of=_by_tag, cost=lambda item: f"{item.get('Size')} GiB, by its size",
         state=lambda item: str(item["State"]), arn=r"ec2:volume/(.+)"),
    ResourceType(name="snapshot", service="ec2", call="describe_snapshots", at="Snapshots",
         id="SnapshotId", params={"OwnerIds": ["self"]}, is_of=_by_tag,
         cost=lambda item: f"of {item.get('VolumeSize')} GiB, by what it holds",
         arn=r"ec2:snapshot/(.+)"),
    ResourceType(name="network interface", service="ec2", call="describe_network_interfaces",
         at="NetworkInterfaces", id="NetworkInterfaceId", is_of=_in_network, cost=_BARS,
         arn=r"ec2:network-interface/(.+)"),
    ResourceType(name="NAT gateway", service="ec2", call="describe_nat_gateways", at="NatGateways",
         id="NatGatewayId", is_of=_in_network, cost=_constant_text(f"${NAT_USD_PER_HOUR:.3f} an "
         "hour, with its address"), state=lambda item: str(item["State"]),
         arn=r"ec2:natgateway/(.+)"),
    ResourceType(name="elastic address", service="ec2", call="describe_addresses", at="Addresses",
         id="AllocationId", is_of=_by_tag, cost=_constant_text("$0.005 an hour"),
         arn=r"ec2:elastic-ip/(.+)"),
    ResourceType(name="VPC endpoint", service="ec2", call="describe_vpc_endpoints",
         at="VpcEndpoints",
         id="VpcEndpointId", is_of=_in_network, cost=_constant_text("its price an hour"),
         state=lambda item: str(item["State"]), arn=r"ec2:vpc-endpoint/(.+)"),
    ResourceType(name="security group", service="ec2", call="describe_security_groups",
         at="SecurityGroups", id="GroupId", is_of=is_group, cost=_BARS,
         arn=r"ec2:security-group/(.+)"),
    ResourceType(name="internet gateway", service="ec2", call="describe_internet_gateways",
         at="InternetGateways", id="InternetGatewayId", is_of=_in_network, cost=_BARS,
         arn=r"ec2:internet-gateway/(.+)"),
    ResourceType(name="subnet", service="ec2", call="describe_subnets", at="Subnets", id="SubnetId",
         is_of=_in_network, cost=_FREE, arn=r"ec2:subnet/(.+)"),
    ResourceType(name="VPC", service="ec2", call="describe_vpcs", at="Vpcs", id="VpcId",
         is_of=_in_network, cost=_FREE, arn=r"ec2:vpc/(.+)"),
    ResourceType(name="launch template", service="ec2", call="describe_launch_templates",
         at="LaunchTemplates", id="LaunchTemplateId", is_of=_by_name("LaunchTemplateName",
         "eksctl-{name}-", "shardyard-{name}-batch"), cost=_FREE, arn=r"ec2:launch-template/(.+)"),
    ResourceType(name="placement group", service="ec2", call="describe_placement_groups",
         at="PlacementGroups", id="GroupName", is_of=_by_name("GroupName", "eksctl-{name}-"),
         cost=_FREE, state=lambda item: str(item.get("State", "")),
         arn=r"ec2:placement-group/(.+)"),
    ResourceType(name="Auto Scaling group", service="autoscaling",
         call="describe_auto_scaling_groups",
         at="AutoScalingGroups", id="AutoScalingGroupName", is_of=_scaling_group,
         cost=_constant_text("starts instances"), arn=r"autoscaling:.*autoScalingGroupName/(.+)"),
    ResourceType(name="compute environment", service="batch", call="describe_compute_environments",
         at="computeEnvironments", id="computeEnvironmentName", is_of=_in_network,
         cost=_constant_text("starts instances"), state=lambda item: str(item.get("status", "")),
         arn=r"batch:compute-environment/(.+)"),
    ResourceType(name="job queue", service="batch", call="describe_job_queues", at="jobQueues",
         id="jobQueueName", is_of=_by_tag, cost=_is_nothing_but(" by itself"),
         state=lambda item: str(item.get("status", "")), arn=r"batch:job-queue/(.+)"),
    ResourceType(name="ECS cluster", service="ecs", call="list_clusters", at="clusterArns", id="",
         is_of=_ecs_cluster, cost=_is_nothing_but(" by itself"), arn=r"ecs:cluster/(.+)"),
    ResourceType(name="classic load balancer", service="elb", call="describe_load_balancers",
         at="LoadBalancerDescriptions", id="LoadBalancerName", is_of=_in_network,
         cost=_constant_text("its price an hour"),
         arn=r"elasticloadbalancing:loadbalancer/([^/]+)"),
    ResourceType(name="load balancer", service="elbv2", call="describe_load_balancers",
         at="LoadBalancers", id="LoadBalancerName", is_of=_in_network,
         cost=_constant_text("its price an hour"),
         arn=r"elasticloadbalancing:loadbalancer/(?:app|net|gwy)/([^/]+)/.*"),
    ResourceType(name="target group", service="elbv2", call="describe_target_groups",
         at="TargetGroups",
         id="TargetGroupName", is_of=_in_network, cost=_FREE,
         arn=r"elasticloadbalancing:targetgroup/([^/]+)/.*"),
    ResourceType(name="FSx file system", service="fsx", call="describe_file_systems",
         at="FileSystems",
         id="FileSystemId", is_of=_in_network, cost=_fsx_cost,
         state=lambda item: str(item.get("Lifecycle") or ""), arn=r"fsx:file-system/(.+)"),
    ResourceType(name="EFS file system", service="efs", call="describe_file_systems",
         at="FileSystems",
         id="FileSystemId", is_of=_by_tag, cost=_efs_cost,
         state=lambda item: str(item.get("LifeCycleState") or ""),
         arn=r"elasticfilesystem:file-system/(.+)"),
    ResourceType(name="log group", service="logs", call="describe_log_groups", at="logGroups",
         id="logGroupName", is_of=_is_log_group,
         cost=lambda item: f"{item.get('storedBytes', 0):,} bytes, which cost by the month",
         arn=r"logs:log-group:(.+?)(?::\*)?"),
    ResourceType(name="IAM role", service="iam", call="list_roles", at="Roles", id="RoleName",
         is_of=_role, cost=_FREE, tags_call="list_role_tags:RoleName"),
    ResourceType(name="OIDC provider", service="iam", call="list_open_id_connect_providers",
         at="OpenIDConnectProviderList", id="Arn", is_of=_oidc_provider, cost=_FREE,
         tags_decide=True,
         tags_call="list_open_id_connect_provider_tags:OpenIDConnectProviderArn"),
)  # fmt: skip
"""All kinds to look for; each is listed whole, page by page."""


# What AWS has of a cluster after its removal, whoever made it: by tag, by name, by network.
#
# eksctl and CloudFormation know what they made. What controllers in the cluster made, or what a
# failed removal left, is found by asking each service. Who does not answer is named: a list that
# was refused is not an empty one. Services tell late of what came and of what went, so they are
# asked until two rounds running find nothing.

SETTLE_S = 300.0
"""Seconds for which services are asked again about what they report as gone."""


@dataclass(frozen=True, kw_only=True)
class OrphanedResource:
    """One thing that is there."""

    kind: str
    id: str
    cost: str
    """Cost while it exists, in words, or that it is free."""


@dataclass(frozen=True, kw_only=True)
class FailedQuery:
    """A question about what is left that got no answer."""

    kind: str
    asked: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Swept:
    """Result of a sweep."""

    orphans: tuple[OrphanedResource, ...]
    failed_queries: tuple[FailedQuery, ...]

    @property
    def is_clean(self) -> bool:
        """Whether all services answered, and no resource is left."""
        return not self.orphans and not self.failed_queries


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Resources of one kind that a service has."""

    kind: ResourceType
    existing: dict[str, Any]
    """Description of each resource that is not over, by id, of any owner."""
    orphans: tuple[OrphanedResource, ...]


def sweep(world: World, *, every_s: float, within_s: float = SETTLE_S) -> Swept:
    """Find everything of a cluster that AWS still has.

    Args:
        every_s: Seconds between two rounds.
        within_s: Seconds after which a resource that is still listed counts as there.
    """
    until = time.monotonic() + within_s
    before: Swept | None = None
    while True:
        is_last = time.monotonic() >= until
        found = _query_all(world)
        if before is not None and found.is_clean and before.is_clean:
            return found
        if before is not None and is_last:
            return _merge_rounds(before, found)
        if before is None or found != before:
            info(f"asked AWS what is left: {_summary(found)}; asking again")
        before = found
        time.sleep(every_s)


def _merge_rounds(before: Swept, latest: Swept) -> Swept:
    """Merge two rounds: what either saw counts as there, as either may have been late."""
    unanswered = {one.kind: one for one in (*before.failed_queries, *latest.failed_queries)}
    left = dict.fromkeys((*latest.orphans, *before.orphans))
    return Swept(orphans=tuple(left), failed_queries=tuple(unanswered.values()))


def _summary(result: Swept) -> str:
    kinds = sorted({left.kind for left in result.orphans})
    unanswered = [f"no answer about {one.kind}" for one in result.failed_queries]
    return ", ".join([*kinds, *unanswered]) or "nothing"


def _query_all(world: World) -> Swept:
    """Each kind asked once, and the tagging service about all."""
    traces = traces_of(world)
    answers, unanswered = [], []
    for kind in KINDS:
        try:
            answers.append(_query(kind, world, traces))
        except ShardyardError as error:
            asked = f"{kind.service} {kind.call}"
            unanswered.append(FailedQuery(kind=kind.name, asked=asked, why=str(error)))
    left = [left for answer in answers for left in answer.orphans]
    for key in _tag_keys(world):
        try:
            left += _tagged(key, world, traces, answers)
        except ShardyardError as error:
            asked = "resourcegroupstaggingapi get_resources"
            unanswered.append(FailedQuery(kind=f"tag {key}", asked=asked, why=str(error)))
    first = {(one.kind, one.id): one for one in reversed(left)}  # which says what it costs
    return Swept(orphans=tuple(reversed(first.values())), failed_queries=tuple(unanswered))


def _tag_keys(world: World) -> tuple[str, ...]:
    """Tags of what is the cluster's; of one that was adopted, of what was added to it."""
    if isinstance(world.spec, AdoptedCluster):
        return (OWNER_TAG,)
    return (*NAME_TAGS, f"kubernetes.io/cluster/{world.spec.name}")


def traces_of(world: World) -> Traces:
    """Collect traces of the cluster's resources, from the ledger and from AWS.

    Raises:
        StorageError: The ledger was changed by something else.
    """
    vpcs, subnets = set(), set()
    for entry in world.ledger.all() if world.spec.vpc.id is None else ():
        vpcs |= set(re.findall(r"vpc-[0-9a-f]{8,17}", entry.details.get("vpc", "")))
        subnets |= set(re.findall(r"subnet-[0-9a-f]{8,17}", entry.details.get("subnets", "")))
    known = Traces(
        spec=world.spec, owner=world.owner, vpcs=frozenset(vpcs), subnets=frozenset(subnets)
    )
    try:
        groups = frozenset(
            str(group["GroupId"])
            for group in world.listed("ec2", "describe_security_groups", "SecurityGroups")
            if is_group(group, known)
        )
    except ShardyardError:
        return known  # that they are not listed is told of their kind
    return Traces(
        spec=known.spec, owner=known.owner, vpcs=known.vpcs, subnets=known.subnets, groups=groups
    )


def _query(kind: ResourceType, world: World, traces: Traces) -> _Answer:
    """All of a kind, and which of it is the cluster's.

    Raises:
        ShardyardError: It was not answered.
    """
    existing: dict[str, Any] = {}
    left = []
    for item in world.listed(kind.service, kind.call, kind.at, **kind.params):
        if kind.id and kind.state(item) in OVER:
            continue
        id = str(item[kind.id] if kind.id else item)
        existing[id] = item
        tags = tags_of(item)
        if not kind.is_of(item, traces):
            continue
        if kind.tags_call:
            tags = _fetched_tags(kind, id, world)
            if _is_of_other_cluster(kind, tags, traces):
                continue
        if isinstance(world.spec, AdoptedCluster) and tags.get(OWNER_TAG) != world.owner:
            continue  # it was there before, or is of what was
        left.append(_orphan(kind.name, id, kind.cost(item), tags, traces))
    return _Answer(kind=kind, existing=existing, orphans=tuple(left))


def _is_of_other_cluster(kind: ResourceType, tags: dict[str, str], traces: Traces) -> bool:
    """Check whether a resource belongs to another cluster; one of all regions needs our tags."""
    if kind.tags_decide and not is_tagged(tags, traces):
        return True
    return is_of_another(tags, traces) or is_of_other_name(tags, traces)


def _orphan(
    kind: str, id: str, cost: str, tags: dict[str, str], traces: Traces
) -> OrphanedResource:
    whose = "; of another making of the name" if is_of_another(tags, traces) else ""
    return OrphanedResource(kind=kind, id=id, cost=cost + whose)


def _fetched_tags(kind: ResourceType, id: str, world: World) -> dict[str, str]:
    call, _, key = kind.tags_call.partition(":")
    return tags_of({"Tags": list(world.listed(kind.service, call, "Tags", **{key: id}))})


def _tagged(
    key: str, world: World, traces: Traces, answers: list[_Answer]
) -> Iterator[OrphanedResource]:
    """Yield the resources that the tagging service knows by one tag, of any kind.

    It still lists removed resources for hours; for kinds that were asked, their own service
    decides.
    """
    value = traces.owner if key == OWNER_TAG else traces.spec.name
    values = {} if "/cluster/" in key else {"Values": [value]}
    call = ("resourcegroupstaggingapi", "get_resources", "ResourceTagMappingList")
    for item in world.listed(*call, TagFilters=[{"Key": key, **values}]):
        arn = str(item["ResourceARN"])
        known = _match_arn(arn, answers)
        if known is None:
            yield _orphan("tagged", arn, "look at it by its ARN", tags_of(item), traces)
            continue
        answer, id = known
        if id in answer.existing:
            cost = answer.kind.cost(answer.existing[id])
            yield _orphan(answer.kind.name, id, cost, tags_of(item), traces)


def _match_arn(arn: str, answers: list[_Answer]) -> tuple[_Answer, str] | None:
    """Return the answered kind of an ARN, and its id there; None: no such kind."""
    _, _, service, _, _, resource = [*arn.split(":", 5), *[""] * 6][:6]
    for answer in answers:
        match = re.fullmatch(answer.kind.arn, f"{service}:{resource}") if answer.kind.arn else None
        if match:
            return answer, match.group(1)
    return None


def details_of_network(outputs: dict[str, str]) -> dict[str, str]:
    """Return what the ledger keeps of a network, from its stack, to find what stays in it."""
    subnets = [outputs[key] for key in ("SubnetsPrivate", "SubnetsPublic") if outputs.get(key)]
    return {"vpc": outputs["VPC"], "subnets": ",".join(subnets)}


def listed_of(world: World, kind: str) -> Iterator[Any]:
    """The cluster's things of one kind, as their service lists them.

    Raises:
        ShardyardError: It was not answered.
    """
    traces = traces_of(world)
    (found,) = (one for one in KINDS if one.name == kind)
    for item in world.listed(found.service, found.call, found.at, **found.params):
        if found.is_of(item, traces) and found.state(item) not in OVER:
            yield item
