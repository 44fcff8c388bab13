"""Wrong situations of a cluster that was there before, and of the cluster that is meant."""

import json
from contextlib import ExitStack
from typing import Any

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("cluster adopt, and the cluster that is meant")
row = SITUATIONS.row

_ASKED = (
    "name=theirs", "region=us-east-1", "zone=us-east-1a", "nodes.instance=p4d.24xlarge",
    "nodes.max=2",
)  # fmt: skip


class AdoptDesk(Desk):
    """An AWS account with a cluster that somebody else made, and stand-ins of the programs."""

    account: Any

    def connect(self, stack: ExitStack) -> None:
        """Speak to moto, with the cluster in it."""
        from tests.cluster.clients import playing_aws
        from tests.cluster.standing import OFFERS, Standing, play

        stack.enter_context(playing_aws())
        self.account = Standing(offers=dict(OFFERS))
        self.account.build()
        play(self.environ, self.account)

    def cluster(self, verb: str, *words: str) -> int:
        """A verb about clusters."""
        return self.shardyard("cluster", verb, *words, "--dir", str(self.folder / "clusters"))

    def adopt(self, *words: str) -> int:
        """Adopt the cluster, with what is to be different."""
        return self.cluster("adopt", *_ASKED, *words, "--yes")

    def has_adopted(self) -> None:
        """Adopt it, and be sure of it: the situation comes after."""
        assert self.adopt() == 0, self.said

    def told(self, **what: object) -> None:
        """Let EKS say something else of the cluster."""
        from tests.cluster.clients import TOLD

        real = TOLD["eks", "DescribeCluster"]

        def say(params: dict[str, Any]) -> dict[str, Any] | None:
            answer = real(params)
            if answer is not None:
                answer["cluster"] |= what
            return answer

        TOLD["eks", "DescribeCluster"] = say

    def outside(self) -> set[str]:
        from tests.cluster.clients import client_of

        listed = client_of("cloudformation").describe_stacks()["Stacks"]
        names = {stack["StackName"] for stack in listed}
        paths = (self.folder / "clusters").glob("*/ledger.jsonl")
        known = "".join(path.read_text() for path in paths)
        return {name for name in names if name not in known}


@row(
    "cluster that is not there",
    2,
    says="these credentials see no EKS cluster others in us-east-1",
    do="`aws eks list-clusters --region us-east-1` lists yours",
)
def _(desk: AdoptDesk) -> int:
    return desk.adopt("name=others")


@row("cluster that is not ready", 3, says="theirs is CREATING", do="once it is ACTIVE")
def _(desk: AdoptDesk) -> int:
    desk.told(status="CREATING")
    return desk.adopt()


@row(
    "cluster that this program made elsewhere",
    4,
    says="was made by `shardyard cluster create`",
    do="Work in the folder that made it",
)
def _(desk: AdoptDesk) -> int:
    desk.told(tags={"shardyard-cluster-id": "00" * 8})
    return desk.adopt()


@row(
    "cluster that was made from here",
    2,
    says="theirs was made from here",
    do="`shardyard cluster create` with its description continues",
)
def _(desk: AdoptDesk) -> int:
    from shardyard.cluster.clients import new_world
    from shardyard.cluster.spec_file import read_cluster_spec

    new_world(read_cluster_spec([*_ASKED, "other_zone=us-east-1b"]), desk.folder / "clusters")
    return desk.adopt()


@row(
    "cluster adopted by another description",
    2,
    says="was adopted by another description",
    do="remove what was added with `shardyard cluster delete theirs` first; the cluster stays",
)
def _(desk: AdoptDesk) -> int:
    desk.has_adopted()
    return desk.adopt("nodes.max=3")


@row(
    "setting of a cluster that is made",
    2,
    says="other_zone: is read off the cluster, which is there",
    do="Leave it out",
)
def _(desk: AdoptDesk) -> int:
    return desk.adopt("other_zone=us-east-1b")


@row("queue of Batch to be adopted", 2, says="only an EKS cluster is adopted", do="use `create`")
def _(desk: AdoptDesk) -> int:
    return desk.adopt("kind=batch")


@row(
    "zone without a private subnet",
    2,
    says="theirs has no private subnet in us-east-1c",
    do="Take another zone, or name the subnet",
)
def _(desk: AdoptDesk) -> int:
    return desk.adopt("zone=us-east-1c")


@row(
    "claim that nothing can mount",
    2,
    says="claim default/shared exists and is Lost",
    do="have another one made with storage.claim",
)
def _(desk: AdoptDesk) -> int:
    desk.account.claim("shared", "Lost")
    return desk.adopt("storage.kind=efs")


@row(
    "claim of the recipe that nobody makes",
    2,
    says="the recipe mounts claim default/text (launch.volumes), which is not in theirs",
    do="storage.kind=fsx storage.claim=text storage.namespace=default",
)
def _(desk: AdoptDesk) -> int:
    recipe = desk.folder / "train.yaml"
    recipe.write_text("launch: {volumes: [{path: /text, claim: text}]}\n")
    return desk.adopt(str(recipe))


@row(
    "stack of the name is somebody's",
    4,
    says="It was not changed",
    do="work in the folder that made it, or remove it if it",
)
def _(desk: AdoptDesk) -> int:
    from tests.cluster.clients import client_of

    template = json.dumps({"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}})
    name = "eksctl-theirs-nodegroup-accelerators"
    formation = client_of("cloudformation")
    formation.create_stack(StackName=name, TemplateBody=template)
    code = desk.adopt()
    formation.delete_stack(StackName=name)
    return code


@row(
    "nodes that were there to be scaled",
    2,
    says="the accelerator nodes of theirs existed when it was adopted",
    do="`eksctl scale nodegroup`",
)
def _(desk: AdoptDesk) -> int:
    desk.account.group("p4d.24xlarge", most=2)
    desk.account.nodes = 1
    desk.has_adopted()
    return desk.cluster("scale", "theirs", "1", "--yes")


@row(
    "cluster of the name in another account",
    4,
    says="these credentials are of account 999999999999",
    do="Use credentials of account 123456789012, and check with `aws sts get-caller-identity`",
)
def _(desk: AdoptDesk) -> int:
    desk.account.group("p4d.24xlarge", most=2)
    desk.account.nodes = 1
    desk.has_adopted()
    desk.told(arn="arn:aws:eks:us-east-1:999999999999:cluster/theirs")
    return desk.cluster("delete", "theirs", "--yes")


@row(
    "credentials of another account",
    4,
    says="was made in account 999999999999",
    do="Use credentials of that account (AWS_PROFILE)",
)
def _(desk: AdoptDesk) -> int:
    desk.has_adopted()
    (ledger,) = (desk.folder / "clusters").glob("*/ledger.jsonl")
    ledger.write_text(ledger.read_text().replace("123456789012", "999999999999"))
    return desk.cluster("delete", "theirs", "--yes")


@row(
    "kubeconfig of another cluster",
    2,
    says="kubeconfig names https://another.example, but theirs of account 123456789012",
    do="Move the file away and run the same command again, which writes a new one",
)
def _(desk: AdoptDesk) -> int:
    desk.has_adopted()
    (kubeconfig,) = (desk.folder / "clusters").glob("*/kubeconfig")
    content = json.loads(kubeconfig.read_text())
    content["clusters"][0]["cluster"]["server"] = "https://another.example"
    kubeconfig.write_text(json.dumps(content))
    return desk.cluster("delete", "theirs", "--yes")
