"""Wrong situations of a queue of AWS Batch that `cluster create kind=batch` is to make."""

import json
from typing import Any

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("cluster, kind=batch")
row = SITUATIONS.row

_ZONE = "us-east-1a"
_BASE = (
    "kind=batch", "name=trainers", "region=us-east-1", f"zone={_ZONE}",
    "nodes.instance=p4d.24xlarge", "nodes.max=2",
    f"vpc={{id: vpc-0123456789abcdef0, subnets: {{{_ZONE}: subnet-0123456789abcdef0}}}}",
)  # fmt: skip


class QueueDesk(Desk):
    """A laptop, and an AWS account with a network and nothing else."""

    def connect(self) -> None:
        """Speak to moto, which the test has started."""
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            self.environ.setenv(key, "testing")

    def create(self, *settings: str) -> int:
        """What would be made: nothing is asked of AWS."""
        return self.shardyard("cluster", "create", *_BASE, *settings, "--dry-run")

    def make(self, *settings: str) -> int:
        """Make it, in the account's default network."""
        place = f"vpc={json.dumps(self.network())}"
        words = ["--yes", "--dir", str(self.folder / "clusters")]
        return self.shardyard("cluster", "create", *_BASE, place, *settings, *words)

    def client(self, service: str) -> Any:
        import boto3

        return boto3.client(service, region_name="us-east-1")

    def network(self, zone: str = _ZONE) -> dict[str, Any]:
        """The default one of a zone, as if it were of ours."""
        wanted = {"availability-zone": zone, "default-for-az": "true"}
        only = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
        (subnet,) = self.client("ec2").describe_subnets(Filters=only)["Subnets"]
        return {"id": subnet["VpcId"], "subnets": {_ZONE: subnet["SubnetId"]}}

    def outside(self) -> set[str]:
        listed = self.client("cloudformation").describe_stacks()["Stacks"]
        return {stack["StackName"] for stack in listed}


@row("setting of an EKS cluster", 2, says="other_zone: belongs to kind=eks", do="Leave it out")
def _(desk: QueueDesk) -> int:
    return desk.create("other_zone=us-east-1b")


@row(
    "setting of a Batch queue for an EKS cluster", 2,
    says="nodes.user_data: belongs to kind=batch", do="Leave it out",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("kind=eks", "other_zone=us-east-1b", "nodes.user_data='#!/bin/sh'")


@row(
    "subnets without their network", 2,
    says="vpc.subnets: are given and vpc.id is not",
    do="Give both, or neither for a new network",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("vpc={id: null}")


@row(
    "Spot instances for a queue", 2,
    says="nodes.capacity=spot: Batch runs no multi-node job on Spot",
    do="Use on-demand, a reservation or a capacity block",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("nodes.capacity=spot")


@row(
    "accelerators that nothing trains on", 2,
    says="a run on Trainium1 can be planned, not trained yet", do="Name another",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("nodes.instance=trn1.32xlarge")


@row(
    "instances for which AWS's image has no drivers", 2,
    says="have no drivers for Gaudi", do="Give an image that has them, one of ECS",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("nodes.instance=dl1.24xlarge")


@row(
    "user data that no instance would run", 2,
    says="nodes.user_data: begins with neither #! nor a line #cloud-config",
    do="Begin a script with #!/bin/sh",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("nodes.user_data=mount /fsx")


@row(
    "user data above what EC2 takes", 2,
    says="EC2 takes 14,336 in addition to ours", do="Let it download long",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create(f"nodes.user_data={json.dumps('#!' + 'a' * 14336)}")


@row("bucket that is none", 2, says="jobs.bucket=runs is not a bucket", do="s3://my-bucket/prefix")
def _(desk: QueueDesk) -> int:
    return desk.create("jobs.bucket=runs")


@row(
    "secret that is none", 2,
    says="is neither the ARN of a secret nor the name of an SSM parameter",
    do="aws secretsmanager describe-secret --secret-id NAME",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.create("jobs.secrets=['hub token']")


@row(
    "default group in which nodes would not meet", 2,
    says="does not let itself in on port", do="aws ec2 authorize-security-group-ingress",
)  # fmt: skip
def _(desk: QueueDesk) -> int:
    return desk.make()


@row("subnet of another zone", 2, says="is in us-east-1b of", do="Name a subnet of these")
def _(desk: QueueDesk) -> int:
    return desk.make(f"vpc={json.dumps(desk.network('us-east-1b'))}")


@row("subnet that is too small", 3, says="free addresses, and 64 x", do="Take a larger subnet")
def _(desk: QueueDesk) -> int:
    ec2 = desk.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    small = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.0.0/24", AvailabilityZone=_ZONE)
    place = {"id": vpc, "subnets": {_ZONE: small["Subnet"]["SubnetId"]}}
    return desk.make(f"vpc={json.dumps(place)}", "nodes={instance: p5.48xlarge, max: 64}")
