"""The kinds of things that a cluster may leave in AWS: how each is listed, known as ours, priced.

A thing is the cluster's by its tags, by its name, or by the network that was made for it. Whose
making of the name it was is told, not judged: what has another id costs all the same.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardyard.cluster.batch.stack import environments, log_group, stack_name
from shardyard.cluster.eksctl import NAME_TAG, OWNER_TAG
from shardyard.cluster.prices import (
    CONTROL_PLANE_USD_PER_HOUR,
    NAT_USD_PER_HOUR,
    fsx_usd_per_month,
)
from shardyard.cluster.spec import SYSTEM_USD_PER_HOUR, Description
from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.launchers.ledger import UUID

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
    """What the cluster's things are known by."""

    given: Description
    owner: str
    vpcs: frozenset[str] = frozenset()
    """Networks that were made for it; one that was there before has others' things in it."""
    subnets: frozenset[str] = frozenset()
    """Of those networks."""
    groups: frozenset[str] = frozenset()
    """Security groups that are its: what has one of them is its, too."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of thing."""

    name: str
    service: str
    call: str
    at: str
    """Where the list is in the answer."""
    id: str
    """Key of its id; empty: the item is the id."""
    is_of: Callable[[Any, Traces], bool]
    """Whether one is the cluster's."""
    cost: Callable[[Any], str]
    """What it costs, in words."""
    state: Callable[[Any], str] = lambda _: ""
    params: Mapping[str, Any] = field(default_factory=dict)
    arn: str = ""
    """Pattern of ``service:resource`` of its ARN, with the id in a group; empty: it has none."""
    tags_call: str = ""
    """Call that tells its tags, and key of its id there, where the list does not."""
    tags_decide: bool = False
    """Whether its tags alone say whose it is."""


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
    name = traces.given.name
    named = any(tags.get(key) == name for key in NAME_TAGS)
    return named or f"kubernetes.io/cluster/{name}" in tags


def is_of_another(tags: Mapping[str, str], traces: Traces) -> bool:
    """Whether tags say that another making of the name brought it."""
    return tags.get(OWNER_TAG, traces.owner) != traces.owner


def is_of_other_name(tags: Mapping[str, str], traces: Traces) -> bool:
    """Whether tags name another cluster: names of things alone do not tell a-b of a."""
    return any(tags.get(key, traces.given.name) != traces.given.name for key in NAME_TAGS)


def _by_tag(item: Any, traces: Traces) -> bool:
    return is_tagged(tags_of(item), traces)


def _by_name(key: str, *starts: str) -> Callable[[Any, Traces], bool]:
    def is_of(item: Any, traces: Traces) -> bool:
        name = str(item.get(key, ""))
        found = name.startswith(tuple(start.format(name=traces.given.name) for start in starts))
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
    name = traces.given.name
    if item.get("GroupName") == "default":
        return False
    starts = (f"eksctl-{name}-", f"eks-cluster-sg-{name}-", f"{stack_name(traces.given)}-Group-",
              f"shardyard-{name}-storage-Group-")  # fmt: skip
    named = str(item.get("GroupName", "")).startswith(starts)
    named = named and not is_of_other_name(tags_of(item), traces)
    return named or _in_network(item, traces)


def _is_cluster(item: Any, traces: Traces) -> bool:
    return traces.given.kind == "eks" and item == traces.given.name


def _is_log_group(item: Any, traces: Traces) -> bool:
    name, group = traces.given.name, str(item["logGroupName"])
    if traces.given.kind == "batch":
        return group == log_group(traces.given)
    return group.startswith((f"/aws/eks/{name}/", f"/aws/containerinsights/{name}/"))


def _of_environment(name: str, traces: Traces) -> bool:
    """Whether Batch made it for an environment: it draws an id behind the environment's name."""
    environment = "|".join(re.escape(one) for one in environments(traces.given).values())
    made = rf"(AWSBatch-)?({environment})(_Batch_|-asg-|-){UUID}"
    return re.fullmatch(made, name.rpartition("/")[2]) is not None


def _ecs_cluster(item: Any, traces: Traces) -> bool:
    return _of_environment(str(item), traces)


def _scaling_group(item: Any, traces: Traces) -> bool:
    return _in_network(item, traces) or _of_environment(str(item["AutoScalingGroupName"]), traces)


def _role(item: Any, traces: Traces) -> bool:
    starts = (f"eksctl-{traces.given.name}-", f"{stack_name(traces.given)}-")
    return str(item["RoleName"]).startswith(starts)


def _oidc_provider(item: Any, traces: Traces) -> bool:
    return f"/oidc.eks.{traces.given.region}." in str(item["Arn"])


def _says(words: str) -> Callable[[Any], str]:
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
    return _says(f"costs nothing{words}")


_BARS = _is_nothing_but(", and stands in the way of the network")
_FREE = _is_nothing_but("")

KINDS = (
    Kind(name="EKS cluster", service="eks", call="list_clusters", at="clusters", id="",
         is_of=_is_cluster, cost=_says(f"${CONTROL_PLANE_USD_PER_HOUR:.2f} an hour"),
         arn=r"eks:[^/]+/([^/]+).*"),
    Kind(name="CloudFormation stack", service="cloudformation", call="describe_stacks",
         at="Stacks", id="StackName", is_of=_by_name("StackName", "eksctl-{name}-",
         "shardyard-{name}-network", "shardyard-{name}-storage", "shardyard-{name}-batch"),
         cost=_says("what is in it"),
         state=lambda item: str(item["StackStatus"]), arn=r"cloudformation:stack/([^/]+)/.*"),
    Kind(name="instance", service="ec2", call="describe_instances", at="Reservations.Instances",
         id="InstanceId", is_of=_in_network, cost=_instance_cost,
         state=lambda item: str(item["State"]["Name"]), arn=r"ec2:instance/(.+)"),
    Kind(name="volume", service="ec2", call="describe_volumes", at="Volumes", id="VolumeId",
         is_of=_by_tag, cost=lambda item: f"{item.get('Size')} GiB, by its size",
         state=lambda item: str(item["State"]), arn=r"ec2:volume/(.+)"),
    Kind(name="snapshot", service="ec2", call="describe_snapshots", at="Snapshots",
         id="SnapshotId", params={"OwnerIds": ["self"]}, is_of=_by_tag,
         cost=lambda item: f"of {item.get('VolumeSize')} GiB, by what it holds",
         arn=r"ec2:snapshot/(.+)"),
    Kind(name="network interface", service="ec2", call="describe_network_interfaces",
         at="NetworkInterfaces", id="NetworkInterfaceId", is_of=_in_network, cost=_BARS,
         arn=r"ec2:network-interface/(.+)"),
    Kind(name="NAT gateway", service="ec2", call="describe_nat_gateways", at="NatGateways",
         id="NatGatewayId", is_of=_in_network, cost=_says(f"${NAT_USD_PER_HOUR:.3f} an hour, "
         "with its address"), state=lambda item: str(item["State"]), arn=r"ec2:natgateway/(.+)"),
    Kind(name="elastic address", service="ec2", call="describe_addresses", at="Addresses",
         id="AllocationId", is_of=_by_tag, cost=_says("$0.005 an hour"),
         arn=r"ec2:elastic-ip/(.+)"),
    Kind(name="VPC endpoint", service="ec2", call="describe_vpc_endpoints", at="VpcEndpoints",
         id="VpcEndpointId", is_of=_in_network, cost=_says("its price an hour"),
         state=lambda item: str(item["State"]), arn=r"ec2:vpc-endpoint/(.+)"),
    Kind(name="security group", service="ec2", call="describe_security_groups",
         at="SecurityGroups", id="GroupId", is_of=is_group, cost=_BARS,
         arn=r"ec2:security-group/(.+)"),
    Kind(name="internet gateway", service="ec2", call="describe_internet_gateways",
         at="InternetGateways", id="InternetGatewayId", is_of=_in_network, cost=_BARS,
         arn=r"ec2:internet-gateway/(.+)"),
    Kind(name="subnet", service="ec2", call="describe_subnets", at="Subnets", id="SubnetId",
         is_of=_in_network, cost=_FREE, arn=r"ec2:subnet/(.+)"),
    Kind(name="VPC", service="ec2", call="describe_vpcs", at="Vpcs", id="VpcId",
         is_of=_in_network, cost=_FREE, arn=r"ec2:vpc/(.+)"),
    Kind(name="launch template", service="ec2", call="describe_launch_templates",
         at="LaunchTemplates", id="LaunchTemplateId", is_of=_by_name("LaunchTemplateName",
         "eksctl-{name}-", "shardyard-{name}-batch"), cost=_FREE, arn=r"ec2:launch-template/(.+)"),
    Kind(name="placement group", service="ec2", call="describe_placement_groups",
         at="PlacementGroups", id="GroupName", is_of=_by_name("GroupName", "eksctl-{name}-"),
         cost=_FREE, state=lambda item: str(item.get("State", "")),
         arn=r"ec2:placement-group/(.+)"),
    Kind(name="Auto Scaling group", service="autoscaling", call="describe_auto_scaling_groups",
         at="AutoScalingGroups", id="AutoScalingGroupName", is_of=_scaling_group,
         cost=_says("starts instances"), arn=r"autoscaling:.*autoScalingGroupName/(.+)"),
    Kind(name="compute environment", service="batch", call="describe_compute_environments",
         at="computeEnvironments", id="computeEnvironmentName", is_of=_in_network,
         cost=_says("starts instances"), state=lambda item: str(item.get("status", "")),
         arn=r"batch:compute-environment/(.+)"),
    Kind(name="job queue", service="batch", call="describe_job_queues", at="jobQueues",
         id="jobQueueName", is_of=_by_tag, cost=_is_nothing_but(" by itself"),
         state=lambda item: str(item.get("status", "")), arn=r"batch:job-queue/(.+)"),
    Kind(name="ECS cluster", service="ecs", call="list_clusters", at="clusterArns", id="",
         is_of=_ecs_cluster, cost=_is_nothing_but(" by itself"), arn=r"ecs:cluster/(.+)"),
    Kind(name="classic load balancer", service="elb", call="describe_load_balancers",
         at="LoadBalancerDescriptions", id="LoadBalancerName", is_of=_in_network,
         cost=_says("its price an hour"), arn=r"elasticloadbalancing:loadbalancer/([^/]+)"),
    Kind(name="load balancer", service="elbv2", call="describe_load_balancers",
         at="LoadBalancers", id="LoadBalancerName", is_of=_in_network,
         cost=_says("its price an hour"),
         arn=r"elasticloadbalancing:loadbalancer/(?:app|net|gwy)/([^/]+)/.*"),
    Kind(name="target group", service="elbv2", call="describe_target_groups", at="TargetGroups",
         id="TargetGroupName", is_of=_in_network, cost=_FREE,
         arn=r"elasticloadbalancing:targetgroup/([^/]+)/.*"),
    Kind(name="FSx file system", service="fsx", call="describe_file_systems", at="FileSystems",
         id="FileSystemId", is_of=_in_network, cost=_fsx_cost,
         state=lambda item: str(item.get("Lifecycle") or ""), arn=r"fsx:file-system/(.+)"),
    Kind(name="EFS file system", service="efs", call="describe_file_systems", at="FileSystems",
         id="FileSystemId", is_of=_by_tag, cost=_efs_cost,
         state=lambda item: str(item.get("LifeCycleState") or ""),
         arn=r"elasticfilesystem:file-system/(.+)"),
    Kind(name="log group", service="logs", call="describe_log_groups", at="logGroups",
         id="logGroupName", is_of=_is_log_group,
         cost=lambda item: f"{item.get('storedBytes', 0):,} bytes, which cost by the month",
         arn=r"logs:log-group:(.+?)(?::\*)?"),
    Kind(name="IAM role", service="iam", call="list_roles", at="Roles", id="RoleName",
         is_of=_role, cost=_FREE, tags_call="list_role_tags:RoleName"),
    Kind(name="OIDC provider", service="iam", call="list_open_id_connect_providers",
         at="OpenIDConnectProviderList", id="Arn", is_of=_oidc_provider, cost=_FREE,
         tags_decide=True,
         tags_call="list_open_id_connect_provider_tags:OpenIDConnectProviderArn"),
)  # fmt: skip
"""Every kind that is looked for; each is asked for whole, page by page."""
