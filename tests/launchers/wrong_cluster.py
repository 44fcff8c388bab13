"""Wrong situations of a cluster as it is rendered for Terraform, and as it is deleted."""

from functools import partial

from shardyard.cluster.create import make
from shardyard.cluster.delete import remove
from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("cluster")
row = SITUATIONS.row

_EKS = (
    "name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b",
    "nodes.instance=p4d.24xlarge",
)  # fmt: skip
_VPC = (
    "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0,"
    " us-east-1b: subnet-0123456789abcdef1}}"
)
_FAST = {"poll_s": 0.0, "limit_s": 0.0}


class ClusterDesk(Desk):
    """A laptop, and an AWS account of moto's in which services may lie."""

    def render(self, *words: str) -> int:
        """For Terraform, or what else is asked with it."""
        return self.shardyard("cluster", "create", *_EKS, *words, "--terraform")

    def delete(self, lie: str) -> int:
        """A cluster that stands, with a service that tells of it what is not so."""
        from tests.cluster.lies import LIES, case_of  # moto, which the page does without

        row = LIES[lie]
        case = case_of(row.on, self.folder / "clusters")
        make(case.world, **_FAST)
        row.begin(case)
        self.environ.setattr("shardyard.cli.cluster.world_named", lambda *_: case.world)
        self.environ.setattr(
            "shardyard.cli.cluster.remove", partial(remove, poll_s=0.0, limit_s=0.0)
        )
        words = ["--yes", "--delete-data", "shardyard-trainers-storage"]
        return self.shardyard("cluster", "delete", "trainers", *words)


@row(
    "a file for Terraform that nobody asked to see", 2,
    says="--terraform prints a file, and Terraform makes what is in it", do="Add --dry-run",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.render(_VPC)


@row(
    "a network of its own for Terraform", 2,
    says="--terraform renders a cluster in a network that is there, and vpc.id is not given",
    do="eksctl makes a network of its own",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.render("--dry-run")


@row(
    "a Batch queue for Terraform", 2,
    says="--terraform renders an EKS cluster, but this is kind=batch",
    do="--dry-run and no --terraform",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    words = [word for word in _EKS if "other_zone" not in word]
    place = "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0}}"
    asked = ("kind=batch", place, "--terraform", "--dry-run")
    return desk.shardyard("cluster", "create", *words, *asked)


@row(
    "deleted nodes that are there still", 1,
    says="not removed: accelerators nodes eksctl-trainers-nodegroup-accelerators is there", do="",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.delete("a deletion of nodes that says done and was never begun")


@row(
    "a volume of a claim behind a deleted cluster", 1,
    says="still in us-east-1: volume vol-", do="8 GiB, by its size",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.delete("the volume of a claim")


@row(
    "no right to ask what is left", 1,
    says="not known whether any is left: load balancer (elbv2 describe_load_balancers)",
    do="have it added to your role",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.delete("a list that is refused")


@row(
    "an answer of AWS without the list that was asked for", 1,
    says="answered without a list of FileSystems, so it is not known what is there",
    do="Look at your proxy and AWS_ENDPOINT_URL",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.delete("an answer without a list")


@row(
    "a page of export tasks that names itself as the next", 1,
    says="names itself as the page behind it, so the list has no end",
    do="Look at your proxy and AWS_ENDPOINT_URL",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.delete("a page of export tasks that names itself as the one behind it")


@row(
    "data that is on its way into the bucket", 1,
    says="is not removed while it does what would be lost: exports into its bucket",
    do="Run the same command again once that has ended",
)  # fmt: skip
def _(desk: ClusterDesk) -> int:
    return desk.delete("an export that is still writing when the file system is to go")
