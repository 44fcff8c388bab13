"""Cluster in an AWS account: one to be made, as its file describes it, or an adopted one.

    name: trainers
    region: us-east-1
    zone: us-east-1a             # of the accelerators and the file system
    other_zone: us-east-1b       # the control plane needs two
    recipe: train.yaml           # what the nodes are, where nodes.instance is left out
    nodes: {instance: p5.48xlarge, max: 4, capacity: reservation:cr-0123456789abcdef0}
    storage: {kind: fsx, size_gib: 4800, bucket: s3://my-data/imagenet}

With ``kind: batch``, it is a queue of AWS Batch with all that it needs.
``cluster/spec_file.py`` reads and checks it. For an adopted cluster, the list of additions is
settled once, before anything is made, and kept. A killed call continues by it, as a cluster to
which half was added lacks only the other half.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from shardyard.config.schema.base import Section
from shardyard.hardware.catalogue import Instance, instance

SYSTEM_USD_PER_HOUR = {"c5.2xlarge": 0.34, "m5.8xlarge": 1.536}
"""Types of the nodes without accelerators, and their price: on-demand, us-east-1, karpenter.sh
price table generated 2026-07-20."""

LARGEST_GROUP = 64
"""Nodes with accelerators in one group, as the sources' clusters have."""

MOST_USER_DATA_BYTES = 14 * 1024
"""EC2 takes 16 KiB, of which 2 are for our own parts. Source: Amazon EC2 User Guide, Run commands
when you launch an EC2 instance."""

ONLY_VPC = "private"
"""Value of ``access`` for no address outside the VPC."""

STOP_MARGIN_S = 30
"""Seconds between the end of a drain and the kill."""


class Vpc(Section):
    """A network that exists; left out, a new one is made."""

    id: str | None = None
    """Existing VPC, vpc-... null: a new one with a NAT gateway."""
    subnets: dict[str, str] = Field(default={})
    """Zone -> its private subnet (subnet-...): both zones, or with kind=batch the one."""


class System(Section):
    """Nodes without accelerators, for what runs next to the training."""

    instance: Literal["c5.2xlarge", "m5.8xlarge"] = "c5.2xlarge"
    """Type of the nodes without accelerators."""
    nodes: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of nodes without accelerators; they run and cost while the cluster exists."""


class Nodes(Section):
    """Nodes with accelerators: one group, in one zone."""

    instance: str | None = None
    """EC2 instance type. null: cluster.instance of the recipe."""
    count: Annotated[int, Field(ge=0, le=LARGEST_GROUP)] = 0
    """Nodes to start at once, and with kind=batch to keep without jobs; they cost."""
    max: Annotated[int, Field(ge=1, le=LARGEST_GROUP)] | None = None
    """Most accelerator nodes. null: cluster.nodes of the recipe, or 64."""
    capacity: str | None = None
    """on-demand, spot (kind=eks), reservation:cr-..., or block:cr-... (capacity block for ML).
    null: cluster.capacity of the recipe, or on-demand."""
    efa: bool | Literal["auto"] = "auto"
    """Use Elastic Fabric Adapters (kind=eks). auto: if the type has them."""
    disk_gib: Annotated[int, Field(ge=50, le=16384)] = 500
    """Root disk of a node in GiB, for images and files outside volumes."""
    ami: str | None = None
    """Machine image (ami-...). null: AWS's own, which has no drivers for p3 and dl1."""
    user_data: str | None = None
    """Script (#!...) or #cloud-config to run at the start of a node, after Shardyard's
    (kind=batch)."""
    stop_s: Annotated[int, Field(ge=30, le=86400)] | None = None
    """Seconds that a container gets to stop (kind=batch). null: the recipe's drain time plus 30."""


class Storage(Section):
    """A file system that all nodes can write, and a claim on it."""

    kind: Literal["none", "fsx", "efs"] = "none"
    """Shared file system: FSx for Lustre or EFS."""
    size_gib: Annotated[int, Field(ge=1)] = 1200
    """FSx: size in GiB: 1,200, 2,400, then steps of 2,400."""
    mb_per_s_per_tib: Literal[125, 250, 500, 1000] = 250
    """FSx: throughput per TiB in MB/s."""
    bucket: str | None = None
    """FSx: s3://bucket/prefix to synchronise with /data, both ways."""
    claim: str = "shared"
    """Name of the claim, for launch.volumes (kind=eks)."""
    namespace: str = "default"
    """Namespace of the claim (kind=eks)."""


class Jobs(Section):
    """Rights of the containers of Batch's jobs."""

    bucket: str | None = None
    """s3://bucket/prefix that jobs may read and write (kind=batch). null: no role for jobs."""
    secrets: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Secrets that jobs may read (kind=batch): ARNs or names of SSM parameters. null: the recipe's.
    """


class ClusterSpec(Section):
    """A cluster."""

    kind: Literal["eks", "batch"] = "eks"
    """An EKS cluster, or a complete AWS Batch queue."""
    name: str
    """Name of the cluster, unique in its region."""
    region: str
    """AWS region."""
    zone: str
    """Availability zone of accelerators and file system."""
    other_zone: str | None = None
    """Second zone, only for the control plane (kind=eks)."""
    version: Annotated[str, Field(pattern=r"^1\.\d\d$", description='a version such as "1.34"')] = (
        "1.34"
    )
    """Kubernetes version (kind=eks)."""
    access: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Address ranges that reach the API server (kind=eks), or [private]. null: every address."""
    recipe: str | None = None
    """Recipe to run on the cluster."""
    vpc: Vpc = Vpc()
    system: System = System()
    nodes: Nodes = Nodes()
    storage: Storage = Storage()
    jobs: Jobs = Jobs()

    @property
    def zones(self) -> tuple[str, ...]:
        """Zones that need a subnet."""
        return (self.zone,) if self.other_zone is None else (self.zone, self.other_zone)

    @property
    def instance(self) -> Instance:
        """The type of the nodes with accelerators; it is known once the description is checked."""
        assert self.nodes.instance is not None
        return instance(self.nodes.instance)

    @property
    def has_efa(self) -> bool:
        """Whether the nodes are given Elastic Fabric Adapters."""
        return bool(self.instance.efa_count) if self.nodes.efa == "auto" else self.nodes.efa

    @property
    def capacity(self) -> "Capacity":
        """Capacity that the nodes are taken from."""
        kind, _, reservation = str(self.nodes.capacity).partition(":")
        return Capacity(kind=kind, reservation=reservation or None)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Capacity that nodes are taken from."""

    kind: str
    """``on-demand``, ``spot``, ``reservation`` or ``block``."""
    reservation: str | None


class AdoptedCluster(ClusterSpec):
    """A description whose network and version are those of the cluster."""

    arn: str
    """ARN of the cluster: region, account and name."""
    control_group: str
    """Security group of its control plane."""
    node_group: str
    """Security group that EKS made for control plane and nodes."""
    adds: Annotated[tuple[str, ...], Field(strict=False)]
    """Kinds of the parts that are added, in the order in which they are made."""
    asked: ClusterSpec
    """Description as the user wrote it."""
