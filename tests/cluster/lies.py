"""Ways in which real services lie to whoever removes a cluster, each played in moto's AWS.

A row says what is told or done behind the program's back, and words of the output that name it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.cluster.clients import World, new_world
from shardyard.cluster.spec_file import read_cluster_spec
from tests.cluster import batch_stand_in, stand_in
from tests.cluster.clients import REGION, TOLD, client_of, image, real

PLACE = ("name=trainers", f"region={REGION}", "zone=us-east-1a")
EKS = (*PLACE, "other_zone=us-east-1b", "nodes.instance=p4d.24xlarge")
STACK = "eksctl-trainers-cluster"
NODES = "eksctl-trainers-nodegroup-accelerators"
QUEUE = "shardyard-trainers-batch"
DELETE_NODES = ("eksctl", "delete", "nodegroup")
DELETE_CLUSTER = ("eksctl", "delete", "cluster")


@dataclass(kw_only=True)
class Case:
    """A cluster that stands, and is about to be deleted."""

    world: World
    eks: stand_in.Account = field(default_factory=stand_in.Account)
    batch: batch_stand_in.Account = field(default_factory=batch_stand_in.Account)

    @property
    def vpc(self) -> str:
        """The network that it is in."""
        made = [e.details["vpc"] for e in self.world.ledger.all() if "vpc" in e.details]
        return self.world.spec.vpc.id or made[0]

    @property
    def subnet(self) -> str:
        """One of its subnets."""
        only = [{"Name": "vpc-id", "Values": [self.vpc]}]
        return str(client_of("ec2").describe_subnets(Filters=only)["Subnets"][0]["SubnetId"])

    @property
    def ours(self) -> list[dict[str, str]]:
        """The tags of all that it made."""
        named = {"shardyard-cluster": "trainers", "shardyard-cluster-id": self.world.owner}
        return [{"Key": key, "Value": value} for key, value in named.items()]


@dataclass(frozen=True, kw_only=True)
class Lie:
    """One row."""

    what: str
    named: str
    """Pattern that the output has."""
    on: str
    """``eks``, ``eks in a network that is there``, ``eks with lustre`` or ``batch``."""
    begin: Callable[[Case], None]


LIES: dict[str, Lie] = {}


def lie(
    what: str, *, named: str, on: str = "eks"
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """A row of the table."""

    def keep(begin: Callable[[Case], None]) -> Callable[[Case], None]:
        assert what not in LIES
        LIES[what] = Lie(what=what, named=named, on=on, begin=begin)
        return begin

    return keep


def network_that_is_there() -> str:
    """moto's default one, as a description says it."""
    found = client_of("ec2").describe_subnets()["Subnets"]
    zones = {subnet["AvailabilityZone"]: subnet for subnet in found}
    named = ", ".join(f"{zone}: {zones[zone]['SubnetId']}" for zone in ("us-east-1a", "us-east-1b"))
    return f"vpc={{id: {found[0]['VpcId']}, subnets: {{{named}}}}}"


def case_of(on: str, folder: Path) -> Case:
    """A cluster that is about to be made."""
    if on == "batch":
        (subnet,) = client_of("ec2").describe_subnets(
            Filters=[{"Name": "availability-zone", "Values": ["us-east-1a"]}]
        )["Subnets"]
        place = f"vpc={{id: {subnet['VpcId']}, subnets: {{us-east-1a: {subnet['SubnetId']}}}}}"
        words = ["kind=batch", *PLACE, place, "nodes={instance: g5.xlarge, max: 2}"]
        queue = batch_stand_in.Account()
        world = new_world(read_cluster_spec(words), folder)
        return Case(world=batch_stand_in.in_account(world, queue), batch=queue)
    more = {
        "eks": (),
        "eks with lustre": ("storage.kind=fsx",),
        "eks in a network that is there": (network_that_is_there(),),
    }
    account = stand_in.Account()
    world = new_world(read_cluster_spec([*EKS, *more[on]]), folder)
    return Case(world=stand_in.in_account(world, account), eks=account)


def tell(service: str, operation: str, answer: dict[str, Any]) -> None:
    """The same answer each time."""
    TOLD[service, operation] = lambda _: answer


def refuse(service: str, operation: str, code: str, said: str) -> None:
    """An error each time."""
    tell(service, operation, {"Error": {"Code": code, "Message": said}})


def tell_stack(name: str, change: dict[str, str]) -> None:
    """Stacks as they are, but one of them otherwise."""

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        found = real("cloudformation", "DescribeStacks", params)
        for stack in found["Stacks"]:
            if stack["StackName"] == name:
                stack |= change
        return found

    TOLD["cloudformation", "DescribeStacks"] = answer


@lie("a deletion of nodes that says done and was never begun", named=rf"{NODES} is there")
def _(case: Case) -> None:
    case.eks.lies.add(DELETE_NODES)


@lie("a deletion of the cluster that says done and was never begun", named=rf"{STACK} is there")
def _(case: Case) -> None:
    case.eks.lies.add(DELETE_CLUSTER)


@lie(
    "a cluster whose stack alone is deleted",
    named=rf"{STACK} is failed: it is there without its stack",
)
def _(case: Case) -> None:
    case.eks.lies.add(DELETE_CLUSTER)
    delete = client_of("cloudformation").delete_stack
    case.eks.after[DELETE_CLUSTER] = lambda: delete(StackName=STACK)


@lie("a deletion that is initiated for ever", named=rf"{NODES} is going")
def _(case: Case) -> None:
    case.eks.lies.add(DELETE_NODES)
    case.eks.after[DELETE_NODES] = lambda: tell_stack(NODES, {"StackStatus": "DELETE_IN_PROGRESS"})


@lie("a deletion that fails behind its word", named=rf"{STACK} is failed: DELETE_FAILED: \[VPC\]")
def _(case: Case) -> None:
    case.eks.lies.add(DELETE_CLUSTER)
    failed = {"StackStatus": "DELETE_FAILED", "StackStatusReason": "[VPC] has dependencies"}
    case.eks.after[DELETE_CLUSTER] = lambda: tell_stack(STACK, failed)


@lie("a stack that is gone when it is looked for, and back later", named=rf"{STACK} there")
def _(case: Case) -> None:
    looks: list[Any] = []

    def answer(params: dict[str, Any]) -> dict[str, Any] | None:
        if params.get("StackName") != STACK:
            return None
        looks.append(params)
        if len(looks) == 1:
            said = f"Stack with id {STACK} does not exist"
            return {"Error": {"Code": "ValidationError", "Message": said}}
        stack = {"StackName": STACK, "StackStatus": "CREATE_COMPLETE", "Tags": case.ours}
        return {"Stacks": [stack]}

    def begin() -> None:
        TOLD["cloudformation", "DescribeStacks"] = answer

    case.eks.after[DELETE_CLUSTER] = begin


@lie(
    "a refusal that reads as an absence",
    named=rf"not removed: control plane {STACK}: cannot ask cloudformation.*not authorized",
)
def _(case: Case) -> None:
    said = f"User is not authorized, or stack {STACK} does not exist"
    case.eks.after[DELETE_CLUSTER] = lambda: refuse(
        "cloudformation", "DescribeStacks", "AccessDenied", said
    )


@lie("a foreign stack that takes the name meanwhile", named=rf"{STACK} in us-east-1 exists and")
def _(case: Case) -> None:
    foreign = [
        {"Key": "shardyard-cluster", "Value": "trainers"},
        {"Key": "shardyard-cluster-id", "Value": "f" * 16},
    ]
    body = '{"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}'
    make = client_of("cloudformation").create_stack
    case.eks.after[DELETE_CLUSTER] = lambda: make(StackName=STACK, TemplateBody=body, Tags=foreign)


@lie("a node that joins while its group is deleted", named=r"instance i-\w+ \(")
def _(case: Case) -> None:
    tags = [{"Key": "eks:cluster-name", "Value": "trainers"}]
    run = client_of("ec2").run_instances
    case.eks.after[DELETE_NODES] = lambda: run(
        ImageId=image(), MinCount=1, MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )  # fmt: skip


@lie(
    "a group that starts nodes again, in a subnet of the cluster's",
    named="Auto Scaling group eks-accelerators-1 .starts instances",
)
def _(case: Case) -> None:
    group = {"AutoScalingGroupName": "eks-accelerators-1", "VPCZoneIdentifier": case.subnet}
    tell("autoscaling", "DescribeAutoScalingGroups", {"AutoScalingGroups": [group]})


@lie("an untagged network interface", named="network interface eni-")
def _(case: Case) -> None:
    client_of("ec2").create_network_interface(SubnetId=case.subnet)


@lie(
    "an untagged network interface in a network that others use",
    named="network interface eni-", on="eks in a network that is there",
)  # fmt: skip
def _(case: Case) -> None:
    ec2 = client_of("ec2")
    name = "eks-cluster-sg-trainers-1234567"
    group = ec2.create_security_group(GroupName=name, Description="EKS", VpcId=case.vpc)["GroupId"]
    ec2.create_network_interface(SubnetId=case.subnet, Groups=[group])


@lie("the volume of a claim", named=r"volume vol-\w+ \(8 GiB")
def _(_case: Case) -> None:
    claim_volume()


def claim_volume() -> None:
    """What the driver of EBS makes for a claim, and nobody removes with the cluster."""
    tags = [{"Key": "kubernetes.io/cluster/trainers", "Value": "owned"}]
    named = [{"ResourceType": "volume", "Tags": tags}]
    client_of("ec2").create_volume(AvailabilityZone="us-east-1a", Size=8, TagSpecifications=named)


@lie("a volume that is listed late", named="volume vol-")
def _(_case: Case) -> None:
    claim_volume()
    looks: list[Any] = []

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        looks.append(params)
        late = {"Volumes": []} if len(looks) == 1 else real("ec2", "DescribeVolumes", params)
        return dict(late)

    TOLD["ec2", "DescribeVolumes"] = answer


@lie("a snapshot of a claim", named=r"snapshot snap-\w+ \(")
def _(_case: Case) -> None:
    ec2 = client_of("ec2")
    volume = ec2.create_volume(AvailabilityZone="us-east-1a", Size=8)["VolumeId"]
    tags = [{"Key": "kubernetes.io/cluster/trainers", "Value": "owned"}]
    named = [{"ResourceType": "snapshot", "Tags": tags}]
    ec2.create_snapshot(VolumeId=volume, TagSpecifications=named)


@lie("a load balancer of a service, without tags", named="classic load balancer a0123456789 ")
def _(case: Case) -> None:
    listener = {"Protocol": "tcp", "LoadBalancerPort": 80, "InstancePort": 30080}
    client_of("elb").create_load_balancer(
        LoadBalancerName="a0123456789", Listeners=[listener], Subnets=[case.subnet]
    )


@lie(
    "a load balancer that its tags alone give away",
    named="load balancer k8s-app .its price", on="eks in a network that is there",
)  # fmt: skip
def _(case: Case) -> None:
    client_of("elbv2").create_load_balancer(
        Name="k8s-app",
        Subnets=list(case.world.spec.vpc.subnets.values()),
        Tags=[{"Key": "elbv2.k8s.aws/cluster", "Value": "trainers"}],
    )


@lie("an address that was kept", named="elastic address eipalloc-.*\\$0.005 an hour")
def _(_case: Case) -> None:
    tags = [{"Key": "alpha.eksctl.io/cluster-name", "Value": "trainers"}]
    named = [{"ResourceType": "elastic-ip", "Tags": tags}]
    client_of("ec2").allocate_address(Domain="vpc", TagSpecifications=named)


@lie("a gateway that is deleting for ever", named="NAT gateway nat-0123")
def _(case: Case) -> None:
    gateway = {"NatGatewayId": "nat-0123", "State": "deleting", "VpcId": case.vpc}
    tell("ec2", "DescribeNatGateways", {"NatGateways": [gateway]})


@lie("a log group that the control plane wrote on", named="log group /aws/eks/trainers/cluster")
def _(_case: Case) -> None:
    client_of("logs").create_log_group(logGroupName="/aws/eks/trainers/cluster")


@lie("a log group behind an empty page", named="log group /aws/eks/trainers/cluster .5 bytes")
def _(_case: Case) -> None:
    group = {"logGroupName": "/aws/eks/trainers/cluster", "storedBytes": 5}

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        if params.get("nextToken") == "behind":
            return {"logGroups": [group]}
        return {"logGroups": [], "nextToken": "behind"}

    TOLD["logs", "DescribeLogGroups"] = answer


@lie("a tagged thing behind a page of others", named="tagged arn:aws:sagemaker:")
def _(case: Case) -> None:
    arns = [f"arn:aws:sagemaker:us-east-1:123456789012:domain/d-{n}" for n in range(2)]

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        if params.get("PaginationToken") == "behind":
            return {"ResourceTagMappingList": [{"ResourceARN": arns[1], "Tags": case.ours}]}
        if params["TagFilters"][0]["Key"] != "shardyard-cluster":
            return {"ResourceTagMappingList": [], "PaginationToken": ""}
        return {"ResourceTagMappingList": [], "PaginationToken": "behind"}

    TOLD["resourcegroupstaggingapi", "GetResources"] = answer


@lie(
    "a page that names itself as the one behind it",
    named=r"not known whether any is left: snapshot \(ec2 describe_snapshots\)",
)
def _(_case: Case) -> None:
    tell("ec2", "DescribeSnapshots", {"Snapshots": [], "NextToken": "1"})


@lie("a list that is refused", named=r"not known whether any is left: load balancer .*the right to")
def _(_case: Case) -> None:
    refuse("elbv2", "DescribeLoadBalancers", "AccessDenied", "not authorized")


@lie("a list that is throttled", named="not known whether any is left: EFS file system .*throttled")
def _(_case: Case) -> None:
    refuse("efs", "DescribeFileSystems", "ThrottlingException", "Rate exceeded")


@lie("an answer without a list", named="not known whether any is left: EFS .*without a list of")
def _(_case: Case) -> None:
    tell("efs", "DescribeFileSystems", {})


@lie("a service that cannot be reached", named="not known whether any is left: ECS cluster ")
def _(_case: Case) -> None:
    from botocore.exceptions import EndpointConnectionError

    def answer(_params: dict[str, Any]) -> dict[str, Any]:
        raise EndpointConnectionError(endpoint_url="https://ecs.us-east-1.amazonaws.com")

    TOLD["ecs", "ListClusters"] = answer


@lie("a tagging service that refuses", named="not known whether any is left: tag shardyard-cluster")
def _(_case: Case) -> None:
    refuse("resourcegroupstaggingapi", "GetResources", "AccessDeniedException", "not authorized")


@lie("a role of the cluster's", named="IAM role eksctl-trainers-cluster-ServiceRole-1")
def _(_case: Case) -> None:
    name = "eksctl-trainers-cluster-ServiceRole-1"
    client_of("iam").create_role(RoleName=name, AssumeRolePolicyDocument="{}")


@lie("an identity provider of the cluster's", named="OIDC provider arn:aws:iam::")
def _(_case: Case) -> None:
    client_of("iam").create_open_id_connect_provider(
        Url="https://oidc.eks.us-east-1.amazonaws.com/id/0123456789ABCDEF",
        ThumbprintList=["0" * 40],
        Tags=[{"Key": "alpha.eksctl.io/cluster-name", "Value": "trainers"}],
    )


@lie("a file system that outlives its stack", named=r"FSx file system fs-\w+ .1200 GiB")
def _(case: Case) -> None:
    lustre(case)


def lustre(case: Case) -> str:
    """A file system with the cluster's tags."""
    made = client_of("fsx").create_file_system(
        FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=[case.subnet], Tags=case.ours
    )
    return str(made["FileSystem"]["FileSystemId"])


@lie("what costs nothing yet: a price of $0", named=r"EFS file system fs-\w+ .0\.0 GiB are stored")
def _(case: Case) -> None:
    client_of("efs").create_file_system(CreationToken="x", Tags=case.ours)


@lie(
    "an export that is still writing when the file system is to go",
    named=r"while it does what would be lost: exports into its bucket: task-1 is EXECUTING",
    on="eks with lustre",
)
def _(case: Case) -> None:
    task = {
        "TaskId": "task-1", "FileSystemId": lustre(case), "Lifecycle": "EXECUTING",
        "Type": "EXPORT_TO_REPOSITORY",
    }  # fmt: skip
    tell("fsx", "DescribeDataRepositoryTasks", {"DataRepositoryTasks": [task]})


@lie(
    "a page of export tasks that names itself as the one behind it",
    named="names itself as the page behind it", on="eks with lustre",
)  # fmt: skip
def _(case: Case) -> None:
    lustre(case)
    pages = {"DataRepositoryTasks": [], "NextToken": "1"}
    tell("fsx", "DescribeDataRepositoryTasks", pages)


@lie("an environment gone INVALID", named="INVALID: CLIENT_ERROR", on="batch")
def _(case: Case) -> None:
    case.batch.invalid = "CLIENT_ERROR"
    case.batch.lies.add("DELETE_FAILED")


@lie("a stack that takes its queue's end for granted", named="it is there without", on="batch")
def _(case: Case) -> None:
    case.batch.lies.add("queue stays")


@lie("an environment that is deleting for ever", named=rf"{QUEUE} is going", on="batch")
def _(case: Case) -> None:
    one = {
        "computeEnvironmentName": "shardyard-trainers", "status": "DELETING",
        "tags": {tag["Key"]: tag["Value"] for tag in case.ours},
    }  # fmt: skip
    case.batch.after_delete[QUEUE] = lambda: tell(
        "batch", "DescribeComputeEnvironments", {"computeEnvironments": [one]}
    )


@lie("an ECS cluster that Batch forgot", named="ECS cluster .*AWSBatch-shardyard", on="batch")
def _(_case: Case) -> None:
    name = "AWSBatch-shardyard-trainers-01234567-89ab-cdef-0123-456789abcdef"
    client_of("ecs").create_cluster(clusterName=name)


@lie("a log group that a late container made", named="log group /shardyard/trainers ", on="batch")
def _(case: Case) -> None:
    make = client_of("logs").create_log_group
    case.batch.after_delete[QUEUE] = lambda: make(logGroupName="/shardyard/trainers")
